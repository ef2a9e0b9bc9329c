"""A decision of the law, what limited it, and which pods go first where it is fewer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pagestream_scaling.observation import PodObservation, PodState


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


def drain_order(pods: Iterable[PodObservation]) -> tuple[PodObservation, ...]:
    """Sort pods, cheapest to drain first.

    Pods that have not served yet come first, the youngest of them first; then those with the least KV in use, and of
    these the ones with the fewest streams: what a drained pod held is computed again elsewhere. A pod without a valid
    sample counts as full.
    """
    return tuple(sorted(pods, key=_cost))


def _cost(pod: PodObservation) -> tuple[int, float, float, float, str]:
    starting = pod.state is PodState.STARTING and pod.ready_s is None
    sample = pod.sample
    if starting:
        return (0, 0.0, 0.0, -pod.created_s, pod.name)
    if sample is None or not 0 <= sample.kv_utilization <= 1 or not 0 <= sample.running + sample.waiting < float("inf"):
        return (2, 0.0, 0.0, -pod.created_s, pod.name)
    return (1, sample.kv_utilization, sample.running + sample.waiting, -pod.created_s, pod.name)
