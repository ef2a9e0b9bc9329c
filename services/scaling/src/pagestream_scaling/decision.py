"""What the law says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Limit(StrEnum):
    """What settled the number."""

    KV_UTILIZATION = "KvUtilization"
    BACKLOG = "Backlog"
    AGE = "QueueAge"
    TTFT = "Ttft"
    WORK = "Work"  # there is some, and one pod at least must be there for it
    STABILIZATION = "Stabilization"  # a need of the last window forbids to give pods back (or to order them yet)
    PANIC = "Panic"  # no scale-in for now
    RATE = "Rate"
    MISSING = "MissingSamples"  # fewer might do, but what would show it is missing
    IDLE = "Idle"  # nothing to do for long enough
    MIN = "MinReplicas"
    MAX = "MaxReplicas"
    NONE = "Steady"  # as many as there are is right


@dataclass(frozen=True, slots=True)
class Decision:
    """How many pods the pool should have, and why."""

    desired: int  # replicas for the Deployment
    reason: str  # one sentence for people, with the numbers
    limiting: Limit
    inputs: Mapping[str, float]  # the numbers that it was made from, by name; see docs/autoscaling.md for each
    missing: tuple[str, ...] = ()  # what was missing, stale or absurd, a phrase each
    panicking: bool = False
