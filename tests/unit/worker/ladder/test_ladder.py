"""The ladder on given shares: how far it climbs, when it turns back, and what it never does."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_worker.ladder.effects import effects_at, lowered_batch
from pagestream_worker.ladder.ladder import TOP, Ladder, Pace, Resource, Rung, Shares, Watermarks

MARKS = {
    Resource.DEVICE: Watermarks(1.0, 0.9),
    Resource.HOST: Watermarks(0.95, 0.9),
    Resource.REDIS: Watermarks(0.9, 0.8),
}
CLIMB_S, DESCEND_S, PERIOD_S = 4.0, 8.0, 1.0  # powers of two, so that levels are exact
PACE = Pace(CLIMB_S, DESCEND_S, longest_gap_s=2 * PERIOD_S)
EASY = dict.fromkeys(Resource, 0.5)
Readings = list[tuple[dict[Resource, float], int]]
"""Shares, and for how many periods they last."""

SHARE = st.sampled_from([0.0, 0.79, 0.8, 0.85, 0.9, 0.92, 0.95, 1.0, 1.4])
SHARES = st.fixed_dictionaries(dict.fromkeys(Resource, SHARE))
MOST_READINGS = 40
READINGS = st.lists(st.tuples(SHARES, st.integers(1, 20)), min_size=1, max_size=MOST_READINGS)


def with_share(resource: Resource, share: float | None) -> Shares:
    return EASY | {resource: share}


def walk(ladder: Ladder, shares: Shares, num_periods: int) -> list[Rung]:
    return [ladder.update(shares, PERIOD_S) for _ in range(num_periods)]


def rungs_of(readings: Readings) -> list[Rung]:
    ladder = Ladder(MARKS, PACE)
    return [rung for shares, periods in readings for rung in walk(ladder, shares, periods)]


@pytest.mark.parametrize("resource", Resource)
def test_every_resource_climbs_every_rung_and_ease_leads_back(resource: Resource) -> None:
    ladder, marks = Ladder(MARKS, PACE), MARKS[resource]
    up = walk(ladder, with_share(resource, marks.high), int(TOP * CLIMB_S) + 5)
    higher, lower = list(Rung)[1:], list(Rung)[:-1]
    assert [up.index(rung) + 1 for rung in higher] == [int(CLIMB_S * rung) for rung in higher]
    between = with_share(resource, (marks.high + marks.low) / 2)
    assert set(walk(ladder, between, 100)) == {TOP}, "between the marks nothing moves"
    assert set(walk(ladder, with_share(Resource.REDIS, None), 100)) == {TOP}, "what is unknown is no relief"
    down = walk(ladder, with_share(resource, marks.low - 0.01), int(TOP * DESCEND_S))
    assert [down.index(rung) + 1 for rung in lower] == [int(DESCEND_S * (TOP - rung)) for rung in lower]


def test_a_stopped_process_does_not_skip_rungs() -> None:
    ladder = Ladder(MARKS, PACE)
    walk(ladder, with_share(Resource.HOST, 1.0), 3)
    assert ladder.update(with_share(Resource.HOST, 1.0), 3600.0) is Rung.NO_PREFETCH


@given(READINGS)
def test_it_moves_by_one_rung_and_turns_back_after_a_whole_one(readings: Readings) -> None:
    rungs = [Rung.NORMAL, *rungs_of(readings)]
    moves = [(at, after - before) for at, (before, after) in enumerate(pairwise(rungs)) if after != before]
    assert all(abs(move) == 1 for _, move in moves)
    for (first, move), (second, opposite) in pairwise(moves):
        if move != opposite:
            assert (second - first) * PERIOD_S >= min(CLIMB_S, DESCEND_S) - PERIOD_S


@given(READINGS, st.lists(SHARES, min_size=MOST_READINGS, max_size=MOST_READINGS))
def test_less_in_use_is_never_a_higher_rung(readings: Readings, bounds: list[dict[Resource, float]]) -> None:
    less = [
        ({each: min(share, bound[each]) for each, share in shares.items()}, periods)
        for (shares, periods), bound in zip(readings, bounds, strict=False)
    ]
    assert all(low <= high for low, high in zip(rungs_of(less), rungs_of(readings), strict=True))


def test_each_rung_gives_up_more() -> None:
    effects = [effects_at(rung) for rung in Rung]
    assert [each.claims_ahead for each in effects] == [True] + 7 * [False]
    assert [each.keeps_cache for each in effects] == 2 * [True] + 6 * [False]
    assert [each.lowers_batch for each in effects] == 3 * [False] + 5 * [True]
    assert [each.greatest_class for each in effects] == [None, None, None, None, 1, 1, 0, 0]
    assert [each.refused_class for each in effects] == [None, None, None, None, None, 2, 2, 1]


@pytest.mark.parametrize(
    ("most", "running", "lowered"), [(64, 64, 32), (64, 20, 15), (64, 1, 1), (64, 0, 32), (1, 0, 1)]
)
def test_a_lowered_batch(most: int, running: int, lowered: int) -> None:
    assert lowered_batch(most, running) == lowered
