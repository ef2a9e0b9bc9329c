"""The interface of a scaling law in a simulation, and Pagestream's own law behind it."""

from __future__ import annotations

from typing import Protocol

from pagestream_scaling import PoolObservation, ScalingMemory, ScalingPolicy, decide


class Law(Protocol):
    """Decides every `period_s` how many pods a pool should have. Laws keep state: use one object for each run."""

    @property
    def period_s(self) -> float:
        """Seconds between two decisions."""
        ...

    def initial(self, usual: int) -> int:
        """Return how many pods are ready when the trace begins; `usual` is the terms' `initial_engines`."""
        ...

    def desired(self, observation: PoolObservation) -> int:
        """Return how many pods the pool should have now."""
        ...


class PagestreamLaw:
    """Calls `pagestream_scaling.decide` as the operator does."""

    def __init__(self, policy: ScalingPolicy, period_s: float) -> None:
        self.period_s = period_s
        self._policy = policy
        self._memory = ScalingMemory()

    def initial(self, usual: int) -> int:
        """Return `usual` within the policy's bounds."""
        return max(self._policy.min_replicas, min(self._policy.max_replicas, usual))

    def desired(self, observation: PoolObservation) -> int:
        """Return the decision's replicas."""
        decision, self._memory = decide(self._policy, observation, self._memory)
        return decision.desired
