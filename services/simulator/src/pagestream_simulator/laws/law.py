"""The interface of a scaling law in a simulation, and Pagestream's own law behind it."""

from __future__ import annotations

from typing import Protocol

from pagestream_scaling import Learned, PoolObservation, ScalingMemory, ScalingPolicy, decide, resumed


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
    """Calls `pagestream_scaling.decide` as the operator does, and keeps what it learns as the pool's status does."""

    def __init__(self, policy: ScalingPolicy, period_s: float) -> None:
        self.period_s = period_s
        self._policy = policy
        self._memory = ScalingMemory()
        self._status = Learned()

    def restart(self) -> None:
        """Lose what a process remembers, as when the operator restarts. The pool's status stays."""
        self._memory = ScalingMemory()

    def initial(self, usual: int) -> int:
        """Return `usual` within the policy's bounds."""
        return max(self._policy.min_replicas, min(self._policy.max_replicas, usual))

    def desired(self, observation: PoolObservation) -> int:
        """Return the decision's replicas."""
        memory = resumed(self._memory, self._status, self._policy, observation.time_s).memory
        decision, self._memory = decide(self._policy, observation, memory)
        self._status = Learned.of(self._memory)
        return decision.desired


class RestartedLaw:
    """Pagestream's law in an operator that restarts once."""

    def __init__(self, law: PagestreamLaw, at_s: float) -> None:
        """`at_s`: the first decision from then on is made by the new process."""
        self.period_s = law.period_s
        self._law, self._at_s = law, at_s
        self._has_restarted = False

    def initial(self, usual: int) -> int:
        """Return what the law begins with."""
        return self._law.initial(usual)

    def desired(self, observation: PoolObservation) -> int:
        """Return the law's decision."""
        if not self._has_restarted and observation.time_s >= self._at_s:
            self._law.restart()
            self._has_restarted = True
        return self._law.desired(observation)
