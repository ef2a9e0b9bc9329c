"""How engines share out their models, on virtual time: nobody starves, nobody flaps, one request moves one engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat

from hypothesis import example, given, settings
from hypothesis import strategies as st
from pagestream_worker.models.sharing import Change, Demand, EngineState, SharingLimits, plan_changes
from pagestream_worker.models.turns import Turns

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


@settings(deadline=None)
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


@settings(max_examples=40, deadline=None)
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
                turn.begin(engine.serving, self.now_s)
            self.served_ms[engine.serving] = round(self.now_s * 1000)
            queue = self.queues[engine.serving]
            is_prefilling = queue > 0 and served_s < self.prefill_s
            self.queues[engine.serving] -= 0 if is_prefilling else min(rate, queue)
            owes = turn.owes({"first"} if is_prefilling else (), self.now_s)
            engine = replace(engine, active=int(queue > 0), owes=owes)
        self.engines[engine.engine_id] = replace(engine, served_s=served_s, is_loading=is_loading)

    def is_served(self, model: str) -> bool:
        return any(each.serving == model and not each.is_loading for each in self.engines.values())


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=25, deadline=None)
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
