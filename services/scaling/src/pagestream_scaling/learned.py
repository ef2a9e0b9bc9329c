"""What the law has measured of a pool and must outlive its process. docs/autoscaling.md, "A new leader"."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from pagestream_scaling.memory import ScalingMemory
from pagestream_scaling.policy import ScalingPolicy
from pagestream_scaling.workload import CAPACITY_MIN

_CAPACITY_FACTOR = 1000.0
"""How far a capacity may be from the policy's prior, up or down: a wider one is a mistake and no engine."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The part of a memory that a caller keeps outside of its process: what takes a queue, or minutes, to learn again.

    Times are Unix seconds.
    """

    capacity: float | None = None
    """Work per second that a pod was seen to do at saturation; None: it never was."""
    capacity_s: float | None = None
    """When it was last seen."""
    believed: float = 0.0
    """The part of it that is still what was believed before, 0 to 1."""
    rise: float | None = None
    """How far above their level arrivals rose of late, in prompt tokens per second."""
    rise_s: float | None = None
    """When the last of these arrivals was measured."""

    @classmethod
    def of(cls, memory: ScalingMemory) -> Self:
        """Return what is worth keeping of a memory: what was seen at saturation, and no estimate from load."""
        known = cls() if memory.capacity_s is None else cls(memory.capacity, memory.capacity_s, memory.believed)
        if not memory.arrivals or memory.rise is None:
            return known
        return replace(known, rise=memory.rise, rise_s=memory.arrivals[-1][0])


class Resumed(NamedTuple):
    """A memory with what was learnt elsewhere."""

    memory: ScalingMemory
    dropped: dict[str, str]
    """Fields that can't be true and were left out, with the reason, which is the same at each call."""


def resumed(
    memory: ScalingMemory, known: Learned, policy: ScalingPolicy, now_s: float, *, share: float = 1.0
) -> Resumed:
    """Add to a memory what was learnt elsewhere, as far as it is newer and can be true.

    A capacity counts where it was measured later than the memory's own, and within a factor of 1,000 of the policy's
    prior. Rises count for a memory without a decision, until it has watched arrivals for as long itself, and up to what
    `max_replicas` pods can do. A time in the future, from another clock, is now; a capacity from more than
    `samples.future_s` ahead counts only where none was measured here.

    Args:
        share: the part of arrivals that falls to the pool, 0 to 1.
    """
    memory, dropped = _with_capacity(memory, known, policy, now_s)
    if memory.time_s is not None or known.rise is None:
        return Resumed(memory, dropped)
    trouble = _rise_trouble(known, policy)
    if trouble is not None:
        return Resumed(memory, dropped | {"rise": trouble})
    rise, rise_s = known.rise, now_s if known.rise_s is None else min(known.rise_s, now_s)
    if memory.capacity is not None and share > 0:
        rise = min(rise, policy.max_replicas * memory.capacity / share)
    until_s = rise_s + policy.backlog.arrival_window_s
    return Resumed(replace(memory, earlier_rise=rise, earlier_rise_until_s=until_s), dropped)


def _with_capacity(
    memory: ScalingMemory, known: Learned, policy: ScalingPolicy, now_s: float
) -> tuple[ScalingMemory, dict[str, str]]:
    if known.capacity is None:
        return memory, {}
    trouble = _time_trouble(known.capacity_s) or _capacity_trouble(known.capacity, policy)
    if trouble is not None:
        return memory, {"capacity": trouble}
    measured_s = now_s if known.capacity_s is None else known.capacity_s
    if memory.capacity_s is not None and measured_s > now_s + policy.samples.future_s:
        return memory, {"capacity": "its time is in the future"}
    if memory.capacity_s is not None and min(measured_s, now_s) <= memory.capacity_s:
        return memory, {}
    is_part = 0 <= known.believed <= 1
    added = replace(
        memory,
        capacity=known.capacity,
        inherited=known.capacity,
        capacity_s=min(measured_s, now_s),
        believed=known.believed if is_part else 1.0,
    )
    return added, {} if is_part else {"believed": "it is no number from 0 to 1"}


def _capacity_trouble(capacity: float, policy: ScalingPolicy) -> str | None:
    prior = policy.backlog.prior_tokens_per_s
    low, high = max(CAPACITY_MIN, prior / _CAPACITY_FACTOR), prior * _CAPACITY_FACTOR
    if low <= capacity <= high:  # also refuses NaN
        return None
    return f"it isn't within {low:g} to {high:g} tokens/s, the prior of {prior:g} divided and multiplied by 1,000"


def _rise_trouble(known: Learned, policy: ScalingPolicy) -> str | None:
    most = policy.max_replicas * policy.backlog.prior_tokens_per_s * _CAPACITY_FACTOR
    if known.rise is None or not 0 <= known.rise <= most:
        return f"it isn't within 0 to {most:g} tokens/s, the most that so many pods could do"
    return _time_trouble(known.rise_s)


def _time_trouble(time_s: float | None) -> str | None:
    return "it has no time" if time_s is None or not math.isfinite(time_s) else None


def without_capacity(memory: ScalingMemory) -> ScalingMemory:
    """Return a memory that has to measure capacity again, as for other engines than before."""
    return replace(
        memory,
        capacity=None,
        capacity_s=None,
        inherited=None,
        believed=1.0,
        saturated_since_s=None,
        saturated_samples=0,
        work_high=None,
    )
