"""How the pools of one served name divide its queue: by what their pods can do."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from pagestream_operator.kube.store import PoolKey

_FRESH_S = 10.0
"""A pool that was not decided about for so long is gone."""


@dataclass(frozen=True, slots=True)
class _Capacity:
    models: tuple[str, ...]
    pods: int
    """That serve, or are expected to soon."""
    each: float | None
    """Work per second of one; None before it was measured."""
    is_at_limit: bool
    """Whether it needs more pods than it may have."""
    time_s: float


@dataclass
class Shares:
    """The capacities of all pools, as their scalers have reported them."""

    _known: dict[PoolKey, _Capacity] = field(default_factory=dict)

    def report(
        self, key: PoolKey, *models: str, pods: int, each: float | None, now_s: float, is_at_limit: bool = False
    ) -> None:
        """Replace what is known of a pool with these served names, and forget those that are gone."""
        self._known = {name: pool for name, pool in self._known.items() if abs(now_s - pool.time_s) <= _FRESH_S}
        self._known[key] = _Capacity(models, pods, each, is_at_limit, now_s)

    def share(self, key: PoolKey, model: str, now_s: float) -> float:
        """Return the part of the model's queue that falls to a pool.

        A pool whose pods were not measured yet counts as able as the others. A pool without pods has no share, unless
        all that have pods need more than they may have: then it counts as one pod. Where no pool has pods, all get the
        same.
        """
        there = {
            name: pool
            for name, pool in self._known.items()
            if model in pool.models and (name == key or abs(now_s - pool.time_s) <= _FRESH_S)
        }
        if key not in there:  # before its first decision
            return 0.0 if there else 1.0
        measured = [pool.each for pool in there.values() if pool.each]
        usual = fmean(measured) if measured else 1.0
        serving = [pool for pool in there.values() if pool.pods > 0]
        is_short = bool(serving) and all(pool.is_at_limit for pool in serving)
        capacity = {name: max(pool.pods, int(is_short)) * (pool.each or usual) for name, pool in there.items()}
        total = sum(capacity.values())
        return capacity[key] / total if total > 0 else 1 / len(there)
