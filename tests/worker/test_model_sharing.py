"""How engines share out their models, on virtual time: nobody starves, nobody flaps, one request moves one engine.

Then what a turn owes to its requests, what an operator's order has an engine do, and how often a failed load is tried.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pagestream_streams.admin import EngineModelsView, EngineRow, Order, Verb
from pagestream_worker import (
    FIRST_DELAY_S,
    MOST_DELAY_S,
    Change,
    Demand,
    Duties,
    EngineState,
    Failures,
    SharingLimits,
    Turns,
    plan_changes,
    read_duties,
)

MODELS = ("a", "b", "c", "d")
LIMITS = SharingLimits(min_serve_s=10.0, spread_tokens=1000, gain=2.0)
MAX_SERVE_S = 15.0
LOAD_S = 3.0
RATE = 300  # tokens a second of an engine
ANY = frozenset(MODELS)

demands = st.builds(
    lambda requests, tokens, served_ms: Demand(requests, tokens if requests else 0, served_ms),
    st.integers(0, 3),
    st.integers(1, 20_000),
    st.integers(0, 10**6),
)


@st.composite
def fleets(draw: st.DrawFn) -> list[EngineState]:
    def engine(number: int) -> EngineState:
        models = draw(st.sets(st.sampled_from(MODELS), min_size=1).map(frozenset))
        return EngineState(
            f"engine-{number}",
            models,
            serving=draw(st.sampled_from(["", *sorted(models)])),
            is_loading=draw(st.booleans()),
            served_s=draw(st.floats(0, 30)),
            active=draw(st.integers(0, 4)),
            owes=draw(st.booleans()),
            keeps=draw(st.sampled_from(["", *sorted(models)])),
        )

    return [engine(number) for number in range(draw(st.integers(1, 5)))]


@given(fleets(), st.dictionaries(st.sampled_from(MODELS), demands, min_size=1))
def test_changes_are_those_of_any_reader_and_keep_the_limits(
    engines: list[EngineState], waiting: Mapping[str, Demand]
) -> None:
    changes = plan_changes(engines, waiting, LIMITS)
    shuffled = dict(reversed(waiting.items()))
    assert plan_changes(engines[::-1], shuffled, LIMITS) == changes, "engines would decide differently"
    by_id = {each.engine_id: each for each in engines}
    assert len({each.engine_id for each in changes}) == len(changes)
    for change in changes:
        engine, demand = by_id[change.engine_id], waiting[change.model]
        assert change.model in engine.models - {engine.serving}
        assert not engine.is_loading
        assert demand.requests
        is_idle = not engine.active and not waiting.get(engine.serving, Demand()).requests
        assert not engine.serving or is_idle or (engine.served_s >= LIMITS.min_serve_s and not engine.owes)


@settings(max_examples=20)
@given(fleets(), st.sampled_from(MODELS))
def test_one_request_moves_one_engine(engines: list[EngineState], model: str) -> None:
    changes = plan_changes(engines, {model: Demand(requests=1, tokens=999)}, LIMITS)
    assert len(changes) + sum(each.serving == model for each in engines) <= max(
        1, sum(each.serving == model for each in engines)
    )


@dataclass
class Fleet:
    """Engines on virtual time, a second a step: each works off RATE tokens of its model's queue, once it has computed a
    prompt, anew in each turn.
    """

    engines: dict[str, EngineState]
    queues: dict[str, int]
    prefill_s: int = 0
    served_ms: dict[str, int] = field(default_factory=dict)
    now_s: float = 0.0
    changes: list[Change] = field(default_factory=list)
    turns: dict[str, Turns] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = {each: Turns(LIMITS.min_serve_s, MAX_SERVE_S) for each in self.engines}

    def step(self, arrivals: Mapping[str, int], rate: int = RATE) -> None:
        for model, tokens in arrivals.items():
            self.queues[model] += tokens
        for each in self.engines.values():
            self._run(each, rate)
        waiting = {
            model: Demand(-(-tokens // 100), tokens, self.served_ms.get(model, 0))
            for model, tokens in self.queues.items()
        }
        for change in plan_changes(list(self.engines.values()), waiting, LIMITS):
            taken = replace(self.engines[change.engine_id], serving=change.model, is_loading=True, served_s=-LOAD_S)
            self.engines[change.engine_id] = replace(taken, active=0, owes=False)
            self.changes.append(change)
        self.now_s += 1

    def _run(self, engine: EngineState, rate: int) -> None:
        served_s = engine.served_s + 1
        is_loading = engine.is_loading and served_s < 0
        if engine.serving and not is_loading:
            turn = self.turns[engine.engine_id]
            if engine.is_loading:
                turn.begin_turn(engine.serving, self.now_s)
            self.served_ms[engine.serving] = round(self.now_s * 1000)
            queue = self.queues[engine.serving]
            is_prefilling = queue > 0 and served_s < self.prefill_s
            self.queues[engine.serving] -= 0 if is_prefilling else min(rate, queue)
            owes = turn.owes({"first"} if is_prefilling else (), self.now_s)
            engine = replace(engine, active=int(queue > 0), owes=owes)
        self.engines[engine.engine_id] = replace(engine, served_s=served_s, is_loading=is_loading)

    def is_served(self, model: str) -> bool:
        return any(each.serving == model and not each.is_loading for each in self.engines.values())


@settings(max_examples=20)
@given(
    st.lists(st.sets(st.sampled_from(MODELS), min_size=1).map(frozenset), min_size=1, max_size=4),
    st.lists(st.dictionaries(st.sampled_from(MODELS), st.integers(1, 2000)), min_size=20, max_size=60),
    st.integers(0, 40),
)
@example([ANY], [{"a": 5000, "b": 5000}], 30)
def test_no_model_with_requests_is_unserved_for_longer_than_the_bound_and_all_end(
    lists: list[frozenset[str]], arrivals: list[dict[str, int]], prefill_s: int
) -> None:
    fleet = Fleet(
        {f"e{index}": EngineState(f"e{index}", models) for index, models in enumerate(lists)},
        dict.fromkeys(MODELS, 0),
        prefill_s,
    )
    loadable = frozenset().union(*lists)
    turn_s = LIMITS.min_serve_s + prefill_s + min(prefill_s, LIMITS.min_serve_s) + 1
    bound_s = (len(loadable) - 1) * (turn_s + LOAD_S + 1) + LOAD_S + 2
    unserved_s = dict.fromkeys(MODELS, 0.0)
    # One engine alone works for min_serve_s of each turn, at least; twice that time, since turns end half used.
    num_tokens = sum(tokens for step in arrivals for model, tokens in step.items() if model in loadable)
    most_s = 2 * (num_tokens / (LIMITS.min_serve_s * RATE) + len(MODELS)) * (turn_s + LOAD_S + 1)
    for step in [*arrivals, *repeat({}, round(most_s))]:
        if not step and not any(fleet.queues.values()):
            break
        fleet.step({model: tokens for model, tokens in step.items() if model in loadable})
        for model in loadable:
            waits = fleet.queues[model] > 0 and not fleet.is_served(model)
            unserved_s[model] = unserved_s[model] + 1 if waits else 0.0
            assert unserved_s[model] <= bound_s, (model, fleet.now_s)
    assert not any(fleet.queues.values()), f"prompts began again at each turn: {fleet.queues}"


@settings(max_examples=25)
@given(st.integers(1, 5), st.dictionaries(st.sampled_from(MODELS), st.integers(1, 20_000), min_size=1))
def test_a_constant_demand_settles_where_there_are_engines_for_all(spare: int, tokens: dict[str, int]) -> None:
    count = len(tokens) - 1 + spare
    fleet = Fleet({f"e{n}": EngineState(f"e{n}", ANY) for n in range(count)}, dict.fromkeys(MODELS, 0) | tokens)
    for _ in range(60):
        fleet.step({}, rate=0)
    settled = len(fleet.changes)
    for _ in range(60):
        fleet.step({}, rate=0)
    assert len(fleet.changes) == settled, fleet.changes[settled:]


def test_who_gives_an_engine() -> None:
    """First one without a model, then one that does nothing."""
    waiting = {"a": Demand(1, 10), "b": Demand(1, 10), "c": Demand(0, 0)}
    engines = [
        EngineState("busy", ANY, "b", served_s=60.0, active=3),
        EngineState("idle", ANY, "c", served_s=1.0),
        EngineState("empty", ANY),
    ]
    expected = ["empty", "idle", "busy"]
    for index in range(3):
        assert plan_changes(engines[: 3 - index], waiting, LIMITS) == (Change(expected[index], "a"),)
    assert plan_changes([replace(engines[0], served_s=9.0)], waiting, LIMITS) == ()
    still = replace(engines[2], wakes=False)
    assert plan_changes([still], waiting, LIMITS) == ()
    assert plan_changes([still], {"a": Demand(is_ordered=True)}, LIMITS) == (Change("empty", "a"),)


def test_an_engine_that_keeps_the_weights_of_a_model_loads_it() -> None:
    asleep = {name: EngineState(name, ANY, keeps=keeps) for name, keeps in (("x", "b"), ("y", ""), ("z", "a"))}
    for gone, taken in (("", "z"), ("z", "y"), ("y", "x")):
        asleep.pop(gone, None)
        assert plan_changes(list(asleep.values()), {"a": Demand(1, 10)}, LIMITS) == (Change(taken, "a"),)


def seconds_owed(turns: Turns, first_token_s: float, began: int = 0) -> int:
    """Return for how long a turn owes a sequence that is claimed at its begin."""
    return next(now for now in range(10_000) if not turns.owes({"a"} if now < first_token_s else (), began + now))


def test_a_turn_owes_the_first_token_and_as_much_time_again() -> None:
    turns = Turns(min_serve_s=10, max_serve_s=60)
    for first_token_s, expected in ((0, 0), (4, 8), (25, 35), (55, 65)):
        turns.begin_turn("a", 0)
        assert seconds_owed(turns, first_token_s) == expected


def test_what_comes_late_in_a_turn_waits_for_the_next() -> None:
    turns = Turns(min_serve_s=10, max_serve_s=60)
    turns.begin_turn("a", 0)
    assert not turns.owes((), 11)
    assert not turns.owes({"late"}, 12)
    turns.begin_turn("a", 20)
    assert turns.owes({"late"}, 40), "the first look counts, however late it is"


def test_a_turn_that_was_too_short_is_twice_as_long_while_that_is_needed() -> None:
    turns = Turns(min_serve_s=10, max_serve_s=60)
    now = 0
    for first_token_s, expected in ((150, 60), (150, 120), (150, 160), (150, 160), (5, 10), (150, 60)):
        turns.begin_turn("a", now)
        assert seconds_owed(turns, first_token_s, now) == expected
        now += expected
        turns.begin_turn("b", now)
        assert seconds_owed(turns, 50, now) == 60, "the limit is that of the model"
        now += 60


def test_turns_grow_to_a_bound() -> None:
    turns = Turns(min_serve_s=10, max_serve_s=60)
    now, owed = 0, []
    for _ in range(7):
        turns.begin_turn("a", now)
        owed.append(seconds_owed(turns, 9_999, now))
        now += owed[-1]
    assert owed == [60, 120, 240, 480, 960, 960, 960]


def test_a_turn_that_an_order_ended_was_not_too_short() -> None:
    turns = Turns(min_serve_s=10, max_serve_s=60)
    turns.begin_turn("a", 0)
    assert turns.owes({"a"}, 2)
    turns.begin_turn("b", 2)
    turns.begin_turn("a", 20)
    assert seconds_owed(turns, 150, 20) == 60


SERVED = ("a", "b")


def beat(rows: dict[str, EngineRow], orders: dict[str, Order], engine_id: str) -> Duties:
    """Let an engine read its duties and do them: it loads a model until its next beat."""
    row = rows[engine_id] = replace(rows[engine_id], is_loading=False)
    duties = read_duties(row, EngineModelsView(0, "", rows, {}, orders))
    for name in duties.done:
        del orders[name]
    if duties.wakes:
        rows[engine_id] = replace(row, serving=duties.wakes, is_loading=True, last="")
    return duties


@pytest.mark.parametrize("beats", ["xyz" * 3, "xxxyyyzzz", "zyx" * 3])
def test_all_engines_that_had_a_model_wake_by_one_order(beats: str) -> None:
    rows = {"x": EngineRow(SERVED, last="a"), "y": EngineRow(SERVED, last="a"), "z": EngineRow(SERVED, last="b")}
    orders = {name: Order(Verb.LOAD, 1) for name in SERVED}
    for engine_id in [*beats, *"xyz"]:
        beat(rows, orders, engine_id)
    assert [row.serving for row in rows.values()] == ["a", "a", "b"]
    assert not orders


def test_an_order_waits_for_no_engine_that_can_not_load() -> None:
    serving, failed = EngineRow(SERVED, serving="a"), EngineRow(SERVED, last="a", failed={"a": "it is cut off"})
    for broken in (failed, replace(failed, failed={}, postponed=("a",))):
        rows, orders = {"x": serving, "y": broken}, {"a": Order(Verb.LOAD, 1)}
        assert not beat(rows, orders, "y").wakes
        beat(rows, orders, "x")
        assert not orders


def test_an_engine_frees_what_it_serves_since_before_the_order() -> None:
    view = EngineModelsView(0, "", {}, {}, {"a": Order(Verb.UNLOAD, 5)})
    row = EngineRow(SERVED, serving="a", since_ms=5)
    assert read_duties(row, view).frees
    for other in (replace(row, since_ms=6), replace(row, is_loading=True), replace(row, serving="b")):
        assert not read_duties(other, view).frees


def test_an_engine_sleeps_with_its_weights_until_it_is_to_free_them() -> None:
    view = EngineModelsView(0, "", {}, {}, {"a": Order(Verb.SLEEP, 5)})
    row = EngineRow(SERVED, serving="a", since_ms=5)
    assert read_duties(row, view) == Duties(sleeps=True)
    asleep = EngineRow(SERVED, last="a", keeps="a", since_ms=5)
    assert read_duties(asleep, view) == Duties()
    assert read_duties(asleep, replace(view, orders={"a": Order(Verb.UNLOAD, 6)})) == Duties(frees=True)
    assert read_duties(replace(asleep, keeps=""), replace(view, orders={"a": Order(Verb.UNLOAD, 6)})) == Duties()


def test_what_may_pass_is_tried_again_ever_later() -> None:
    now_s = [0.0]
    failures = Failures(lambda: now_s[0])
    delays = []
    for _ in range(10):
        failures.note_failure("a", "the hub is away", 1, is_permanent=False)
        began_s = now_s[0]
        while failures.postponed:
            assert failures.postponed == ("a",)
            now_s[0] += 1.0
        delays.append(now_s[0] - began_s)
    assert delays[0] == FIRST_DELAY_S
    assert delays[1] == 2 * FIRST_DELAY_S
    assert delays[-1] == MOST_DELAY_S
    assert not failures.permanent


def test_what_can_not_pass_waits_for_an_operator() -> None:
    failures = Failures()
    failures.note_failure("a", "it is cut off", 10, is_permanent=True)
    assert not failures.forget_before("a", 10)
    assert failures.permanent == {"a": "it is cut off"}
    assert failures.forget_before("a", 11)
    assert not failures.permanent
