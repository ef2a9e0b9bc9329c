"""The ladder on given shares: how far it climbs, when it turns back, and what it never does."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_telemetry import VariableError
from pagestream_worker import (
    BETWEEN_MARKS,
    TOP,
    BatchLimit,
    DegradationSettings,
    Effects,
    Ladder,
    Ladders,
    Pace,
    Resource,
    Rung,
    Rungs,
    Shares,
    Watermarks,
    degradation_settings,
    effects_at,
    host_share,
)

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
    assert set(walk(ladder, with_share(resource, marks.high), 100)) == {Rung.NORMAL}, "at the mark it is well used"
    up = walk(ladder, with_share(resource, marks.high + 0.01), int(TOP * CLIMB_S) + 5)
    higher, lower = list(Rung)[1:], list(Rung)[:-1]
    assert [up.index(rung) + 1 for rung in higher] == [int(CLIMB_S * rung) for rung in higher]
    assert set(walk(ladder, with_share(Resource.REDIS, None), 100)) == {TOP}, "what is unknown is no relief"
    down = walk(ladder, with_share(resource, marks.low - 0.01), int(TOP * DESCEND_S))
    assert [down.index(rung) + 1 for rung in lower] == [int(DESCEND_S * (TOP - rung)) for rung in lower]


@pytest.mark.parametrize("resource", Resource)
def test_between_the_marks_it_comes_back_slowly(resource: Resource) -> None:
    ladder, marks = Ladder(MARKS, PACE), MARKS[resource]
    walk(ladder, with_share(resource, marks.high + 0.01), int(TOP * CLIMB_S))
    pace_s = DESCEND_S * BETWEEN_MARKS
    down = walk(ladder, with_share(resource, (marks.high + marks.low) / 2), int(TOP * pace_s))
    lower = list(Rung)[:-1]
    assert [down.index(rung) + 1 for rung in lower] == [int(pace_s * (TOP - rung)) for rung in lower]


def test_noise_at_the_high_mark_moves_nothing_to_and_fro() -> None:
    ladder, marks = Ladder(MARKS, PACE), MARKS[Resource.DEVICE]
    noise = [with_share(Resource.DEVICE, marks.high + 0.01)] + 8 * [with_share(Resource.DEVICE, marks.high - 0.01)]
    walk(ladder, noise[0], int(3 * CLIMB_S))
    rungs = [ladder.update(shares, PERIOD_S) for _ in range(100) for shares in noise]
    assert set(rungs) == {Rung.SMALL_BATCH}, "one reading up is worth eight between the marks"


def test_a_stopped_process_does_not_skip_rungs() -> None:
    ladder = Ladder(MARKS, PACE)
    walk(ladder, with_share(Resource.HOST, 1.0), 3)
    assert ladder.update(with_share(Resource.HOST, 1.0), 3600.0) is Rung.NO_PREFETCH


@settings(max_examples=30)
@given(READINGS)
def test_it_moves_by_one_rung_and_turns_back_after_a_whole_one(readings: Readings) -> None:
    rungs = [Rung.NORMAL, *rungs_of(readings)]
    moves = [(at, after - before) for at, (before, after) in enumerate(pairwise(rungs)) if after != before]
    assert all(abs(move) == 1 for _, move in moves)
    for (first, move), (second, opposite) in pairwise(moves):
        if move != opposite:
            assert (second - first) * PERIOD_S >= min(CLIMB_S, DESCEND_S) - PERIOD_S


@settings(max_examples=30)
@given(READINGS, st.lists(SHARES, min_size=MOST_READINGS, max_size=MOST_READINGS))
def test_less_in_use_is_never_a_higher_rung(readings: Readings, bounds: list[dict[Resource, float]]) -> None:
    less = [
        ({each: min(share, bound[each]) for each, share in shares.items()}, periods)
        for (shares, periods), bound in zip(readings, bounds, strict=False)
    ]
    assert all(low <= high for low, high in zip(rungs_of(less), rungs_of(readings), strict=True))


@settings(max_examples=30)
@given(READINGS)
def test_who_watches_less_is_never_on_a_higher_rung(readings: Readings) -> None:
    ladders = Ladders(MARKS, PACE)
    for shares, periods in readings:
        for _ in range(periods):
            rungs = ladders.update(shares, PERIOD_S)
            assert rungs.blocks <= rungs.own <= rungs.all == ladders.rung


@pytest.mark.parametrize(
    ("resource", "rungs", "greatest"),
    [
        (Resource.DEVICE, Rungs(TOP, TOP, TOP), 0),
        (Resource.HOST, Rungs(Rung.NORMAL, TOP, TOP), 0),
        (Resource.REDIS, Rungs(Rung.NORMAL, Rung.NORMAL, TOP), None),
    ],
)
def test_only_for_own_memory_a_class_is_left(resource: Resource, rungs: Rungs, greatest: int | None) -> None:
    ladders, short = Ladders(MARKS, PACE), with_share(resource, 1.4)
    reached = [ladders.update(short, PERIOD_S) for _ in range(int(TOP * CLIMB_S))][-1]
    assert reached == rungs
    assert effects_at(reached) == Effects(
        claims_ahead=False, keeps_cache=False, greatest_class=greatest, refused_class=1
    )


def test_each_rung_gives_up_more() -> None:
    effects = [effects_at(Rungs(rung, rung, rung)) for rung in Rung]
    assert [each.claims_ahead for each in effects] == [True] + 7 * [False]
    assert [each.keeps_cache for each in effects] == 2 * [True] + 6 * [False]
    assert [each.greatest_class for each in effects] == [None, None, None, None, 1, 1, 0, 0]
    assert [each.refused_class for each in effects] == [None, None, None, None, None, 2, 2, 1]


@pytest.mark.parametrize(
    ("most", "running", "lowered"), [(64, 64, 32), (64, 28, 21), (64, 1, 16), (64, 0, 16), (1, 0, 1)]
)
def test_a_lowered_batch(most: int, running: int, lowered: int) -> None:
    limit = BatchLimit(most)
    limit.update(Rung.SMALL_BATCH, running)
    assert limit.most == lowered


def test_the_batch_is_lowered_at_each_climb_and_given_back_with_its_rung() -> None:
    limit, most = BatchLimit(64), []
    for rung, running in ((2, 64), (3, 40), (3, 1), (4, 28), (5, 24), (4, 1), (5, 28), (3, 1), (2, 1)):
        limit.update(Rung(rung), running)
        most.append(limit.most)
    assert most == [64, 30, 30, 21, 18, 18, 21, 21, 64]


def test_this_machine_uses_some() -> None:
    assert 0.0 < host_share() < 1.0


@pytest.mark.parametrize(
    ("limit", "used", "files", "share"),
    [
        ("max", 900, 0, 0.25),
        ("1000", 900, 0, 0.9),
        ("1000", 900, 300, 0.6),
        ("1000", 100, 0, 0.25),
        ("1000", None, 0, 0.25),
    ],
)
def test_the_fuller_of_machine_and_container(
    tmp_path: Path, limit: str, used: int | None, files: int, share: float
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  4000 kB\nMemFree:  100 kB\nMemAvailable:  3000 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    if used is not None:
        (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {files // 3}\nactive_file {files - files // 3}\n")
    assert host_share(tmp_path, tmp_path) == pytest.approx(share)


def test_a_system_without_such_files_is_never_short(tmp_path: Path) -> None:
    assert host_share(tmp_path, tmp_path) == 0.0


def test_defaults_and_variables() -> None:
    assert degradation_settings({}) == DegradationSettings()
    assert degradation_settings({"PAGESTREAM_DEGRADATION__REDIS_HIGH": "0.97"}).redis_high == 0.97


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("REDIS_LOW", "0.9", "below redis_high, 0.9"),
        ("CLIMB_S", "1.5", "at least twice period_s, 1.0"),
        ("PERIOD_S", "0", "above 0"),
        ("DISK_HIGH", "1", "unknown setting"),
    ],
)
def test_refusals_name_the_variable(name: str, value: str, message: str) -> None:
    variable = f"PAGESTREAM_DEGRADATION__{name}"
    with pytest.raises(VariableError, match=message) as caught:
        degradation_settings({variable: value})
    assert variable in str(caught.value)
