"""A decision of the law, and what limited it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Limit(StrEnum):
    """What the number of a decision comes from: a term, or the last limit that changed it."""

    KV_UTILIZATION = "KvUtilization"
    BACKLOG = "Backlog"
    AGE = "QueueAge"
    TTFT = "Ttft"
    WORK = "Work"
    """There is some, and it needs one pod at least."""
    STABILIZATION = "Stabilization"
    """A need within the window forbids to remove pods, or to order them yet."""
    PANIC = "Panic"
    """No scale-in for now."""
    RATE = "Rate"
    UNPROVEN = "Unproven"
    """What a pod can do is believed and not measured: pods are removed step by step."""
    MISSING = "MissingSamples"
    """Fewer might be enough, but the samples that would show it are missing."""
    IDLE = "Idle"
    """Nothing to do for long enough."""
    MIN = "MinReplicas"
    MAX = "MaxReplicas"
    NONE = "Steady"
    """As many as there are is right."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas a pool should have, and why."""

    desired: int
    """Replicas for the Deployment."""
    reason: str
    """One sentence for people, with the numbers."""
    limiting: Limit
    inputs: Mapping[str, float]
    """The numbers behind it, by name; docs/autoscaling.md has each."""
    missing: tuple[str, ...] = ()
    """What was missing, stale or absurd, a phrase each."""
    panicking: bool = False
