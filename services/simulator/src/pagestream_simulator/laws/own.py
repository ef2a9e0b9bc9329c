"""The pool's own law: the operator's `decide`, itself."""

from __future__ import annotations

from pagestream_scaling import PoolObservation, ScalingMemory, ScalingPolicy, decide


class OwnLaw:
    """Calls `decide` as the operator does."""

    def __init__(self, policy: ScalingPolicy, period_s: float = 1.0) -> None:
        self.period_s = period_s
        self._policy = policy
        self._memory = ScalingMemory()

    def initial(self, usual: int) -> int:
        """As usual, within the policy's bounds."""
        return max(self._policy.min_replicas, min(self._policy.max_replicas, usual))

    def desired(self, observation: PoolObservation) -> int:
        """What `decide` says."""
        decision, self._memory = decide(self._policy, observation, self._memory)
        return decision.desired
