"""What the law has measured of a pool and must outlive its process. docs/autoscaling.md, "A new leader"."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from pagestream_scaling.memory import ScalingMemory
from pagestream_scaling.policy import BacklogPolicy
from pagestream_scaling.workload import CAPACITY_MIN


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


def resumed(memory: ScalingMemory, known: Learned, policy: BacklogPolicy, now_s: float) -> ScalingMemory:
    """Return a memory that knows what was learnt elsewhere, as far as that is newer.

    A capacity counts where it was measured later than the memory's own. Rises count for a memory without a decision,
    until it has watched arrivals for as long itself. Numbers that can't be true are ignored; a time in the future, from
    another clock, is now.
    """
    capacity, capacity_s = known.capacity, _time(known.capacity_s, now_s)
    if capacity is not None and capacity_s is not None and CAPACITY_MIN <= capacity < math.inf:
        is_newer = memory.capacity_s is None or capacity_s > memory.capacity_s
        if is_newer and 0 <= known.believed <= 1:
            memory = replace(memory, capacity=capacity, capacity_s=capacity_s, believed=known.believed)
    rise, rise_s = known.rise, _time(known.rise_s, now_s)
    if memory.time_s is None and rise is not None and rise_s is not None and 0 <= rise < math.inf:
        memory = replace(memory, earlier_rise=rise, earlier_rise_until_s=rise_s + policy.arrival_window_s)
    return memory


def without_capacity(memory: ScalingMemory) -> ScalingMemory:
    """Return a memory that has to measure capacity again, as for other engines than before."""
    return replace(
        memory,
        capacity=None,
        capacity_s=None,
        believed=1.0,
        saturated_since_s=None,
        saturated_samples=0,
        work_high=None,
    )


def _time(time_s: float | None, now_s: float) -> float | None:
    return None if time_s is None or not math.isfinite(time_s) else min(time_s, now_s)
