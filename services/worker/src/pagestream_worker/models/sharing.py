"""How engines share out their models: a pure function of what waits, of what engines serve, and of the time.

All engines decide on the same readings with the same function, so that each finds the same changes; an engine makes
only its own, and only if nobody has decided on something in between (`Roster.intend`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Demand:
    """What waits for a model."""

    requests: int = 0
    tokens: int = 0
    """Of these requests: prompts, and the outputs that are expected."""
    served_ms: int = 0
    """When an engine last served the model; 0 for never."""
    is_ordered: bool = False
    """Whether an operator has asked for it."""

    @property
    def wants_engine(self) -> bool:
        """Whether an engine without it should load it."""
        return self.requests > 0 or self.is_ordered


NO_DEMAND = Demand()


@dataclass(frozen=True)
class EngineState:
    """One engine that may change its model."""

    engine_id: str
    models: frozenset[str]
    """That it may load."""
    serving: str = ""
    """That it serves or loads; "" where it has none."""
    is_loading: bool = False
    served_s: float = 0.0
    """Seconds that it has served this model."""
    active: int = 0
    """Requests that it runs."""
    owes: bool = False
    """Whether it keeps its model for requests that it has begun, see `Turns`."""
    keeps: str = ""
    """The model whose weights it has, while it serves none."""
    wakes: bool = True
    """Whether requests make it load a model while it has none; False: only an operator does."""


@dataclass(frozen=True)
class SharingLimits:
    """When an engine may leave a model for which there is work."""

    min_serve_s: float = 10.0
    """Seconds for which a model is served before another takes its engine: several times what a change costs."""
    spread_tokens: int = 8192
    """Waiting tokens for each engine above which one more engine takes a model that has engines."""
    gain: float = 2.0
    """How many times as much has to wait for an engine of the model that gets one as for those of the one that gives
    it, after the change."""


@dataclass(frozen=True)
class Change:
    """An engine takes another model."""

    engine_id: str
    model: str


def plan_changes(
    engines: Sequence[EngineState], demands: Mapping[str, Demand], limits: SharingLimits
) -> tuple[Change, ...]:
    """Return the changes to make now, at most one for each engine.

    1. A model that is asked for and has no engine gets one, the longest unserved first: one that does nothing, else one
       of a model that has several, else one that has served its model for `min_serve_s` and owes nothing there. So
       none waits for longer than a turn and a change for each other model that its engines may serve. Of those that
       do nothing, one that keeps the model's weights is taken before others.
    2. Where more than `spread_tokens` wait for each engine of a model, it gets one more: one that does nothing, or one
       of a model that has several and, afterwards, `gain` times less for each.
    """
    states = {each.engine_id: each for each in sorted(engines, key=lambda each: each.engine_id)}
    changes: list[Change] = []
    while (change := _Readings(tuple(states.values()), demands, limits).next_change()) is not None:
        changes.append(change)
        states[change.engine_id] = replace(
            states[change.engine_id], serving=change.model, is_loading=True, served_s=0.0, active=0
        )
    return tuple(changes)


_Cost = tuple[int, float, float, str]
"""Of a change, for comparison; the first figure is one of these."""
_EMPTY, _IDLE, _OF_SEVERAL, _LAST = range(4)


def _kept_cost(engine: EngineState, model: str) -> float:
    """Return what an engine without a model gives up of what it keeps."""
    if engine.keeps:
        return 0.0 if engine.keeps == model else 2.0
    return 1.0


@dataclass(frozen=True)
class _Readings:
    engines: Sequence[EngineState]
    demands: Mapping[str, Demand]
    limits: SharingLimits

    def next_change(self) -> Change | None:
        wanted = [model for model, demand in self.demands.items() if demand.wants_engine]
        unserved = [model for model in wanted if not self._count(model)]
        for model in sorted(unserved, key=lambda each: (self.demands[each].served_ms, each)):
            change = self._cheapest(model, self._cost)
            if change is not None:
                return change
        served = [model for model in wanted if self._count(model)]
        for model in sorted(served, key=lambda each: (-self.demands[each].tokens, each)):
            if self._share_of(model) >= self.limits.spread_tokens:
                change = self._cheapest(model, self._cost_of_one_more)
                if change is not None:
                    return change
        return None

    def _cheapest(self, model: str, cost_of: Callable[[EngineState, str], _Cost | None]) -> Change | None:
        costs = [cost for each in self.engines if (cost := cost_of(each, model)) is not None]
        return Change(min(costs)[-1], model) if costs else None

    def _cost(self, engine: EngineState, model: str) -> _Cost | None:
        """Return what it costs that an engine takes a model without engines; None where it may not."""
        if model not in engine.models or engine.is_loading or engine.serving == model:
            return None
        if not engine.serving:
            if not (engine.wakes or self.demands[model].is_ordered):
                return None
            return _EMPTY, _kept_cost(engine, model), 0.0, engine.engine_id
        current = self.demands.get(engine.serving, NO_DEMAND)
        if not current.wants_engine and not engine.active:
            return _IDLE, 0.0, -engine.served_s, engine.engine_id
        if engine.served_s < self.limits.min_serve_s or engine.owes:
            return None
        count = self._count(engine.serving)
        rank = _OF_SEVERAL if count > 1 else _LAST
        return rank, current.tokens / count, -engine.served_s, engine.engine_id

    def _cost_of_one_more(self, engine: EngineState, model: str) -> _Cost | None:
        """Return what it costs that one more engine takes a model; None where it may not."""
        cost = self._cost(engine, model)
        if cost is None or cost[0] < _OF_SEVERAL:
            return cost
        if cost[0] == _LAST:
            return None
        left = self.demands.get(engine.serving, NO_DEMAND).tokens / (self._count(engine.serving) - 1)
        return cost if self._share_of(model) > self.limits.gain * left else None

    def _share_of(self, model: str) -> float:
        """Tokens that wait for each engine of a model once it has one more."""
        return self.demands[model].tokens / (self._count(model) + 1)

    def _count(self, model: str) -> int:
        return sum(each.serving == model for each in self.engines)
