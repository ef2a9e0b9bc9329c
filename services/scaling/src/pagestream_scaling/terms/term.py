"""What a term of the scaling law gets, and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagestream_scaling.decision import Limit
from pagestream_scaling.policy import ScalingPolicy
from pagestream_scaling.samples import ValidSamples
from pagestream_scaling.supply import Supply
from pagestream_scaling.workload import Workload

_ROUNDING = 1e-9
"""0.8 * 3 / 0.8 is a little more than 3."""
_MOST = 1_000_000
"""Pods; keeps a need finite."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What terms compute from."""

    policy: ScalingPolicy
    replicas: int
    valid: ValidSamples
    supply: Supply
    workload: Workload
    ready_low: int
    """Fewest ready pods of the TTFT window."""
    ready_for_s: float
    """Seconds for which as many pods have been ready as now."""
    kv_sum: float
    """KV utilization added over the pods, smoothed."""
    counted_part: float = 1.0
    """The part of what engines claimed of late that counts by class weights."""


@dataclass(frozen=True, slots=True)
class Term:
    """The answer of one term: how many serving pods it asks for, 0 <= need <= floor."""

    limit: Limit
    need: int
    """Pods that what is known requires."""
    floor: int
    """Pods that might be required, with the worst in place of what is missing."""
    sentence: str
    inputs: dict[str, float] = field(default_factory=dict)


def pods_for(amount: float) -> int:
    """Round up to whole pods."""
    return min(_MOST, max(0, math.ceil(min(amount, float(_MOST)) - _ROUNDING)))
