"""The input of the law: one pool at one moment. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PodState(StrEnum):
    """Where an engine pod is in its life, as Kubernetes shows it."""

    STARTING = "starting"
    """Created (or still to be scheduled), not yet ready for the first time, or not ready now."""
    READY = "ready"
    DRAINING = "draining"
    """Ending: it hands its requests back and takes no new ones."""


@dataclass(frozen=True, slots=True)
class PodSample:
    """The last sample of one engine. It isn't checked here: the law ignores samples that can't be true."""

    time_s: float
    """When it was measured, by the pod's clock."""
    kv_utilization: float
    """Referenced blocks / all blocks, 0 to 1."""
    running: float
    """Requests in the running batch."""
    waiting: float
    """Requests that the engine holds but does not run."""
    prompt_tokens_per_s: float | None = None
    """Computed prompt tokens; None before two samples."""
    generated_tokens_per_s: float | None = None
    startup_s: float | None = None
    """Process start to ready, as the engine measured it."""
    draining: bool = False
    """Whether the engine reports that it is draining."""


@dataclass(frozen=True, slots=True)
class PodObservation:
    """One pod. `sample` is its newest one, however old; None if there never was one."""

    name: str
    state: PodState
    created_s: float
    """The pod's creation timestamp."""
    ready_s: float | None = None
    """When it became ready; None if it never was, or if that is unknown."""
    sample: PodSample | None = None


@dataclass(frozen=True, slots=True)
class ClassSample:
    """One class of the queue: what of it engines may take."""

    name: str
    """The priority class, 0 first; or what begun requests are called that wait for another engine."""
    tokens: float
    """Prompt tokens that wait."""
    age_s: float
    """Of the oldest; 0 if none waits."""
    drain_tokens_per_s: float = 0.0
    """Prompt tokens that engines claim per second."""


@dataclass(frozen=True, slots=True)
class QueueSample:
    """The model's queue, over all partitions and classes. Every gateway reports the same numbers.

    Tokens and age are those of requests that engines may take: more pods would not serve the others sooner.
    """

    time_s: float
    depth: float
    """Requests waiting."""
    tokens: float
    """Their prompt tokens."""
    age_s: float
    """Of the oldest that waits; 0 if none does."""
    running: float
    """Requests owned by engines."""
    drain_tokens_per_s: float | None = None
    """Prompt tokens that engines claim per second; None before a measurement."""
    longest_tokens: float | None = None
    """Prompt tokens of the largest request that waits; None: unknown."""
    drain_longest_per_s: float | None = None
    """The part of `drain_tokens_per_s` that the largest claimed request makes up; None: unknown."""
    output_tokens: float | None = None
    """Output tokens that are expected of what waits; None: unknown."""
    classes: tuple[ClassSample, ...] = ()
    """The same by class, as far as it is known."""


@dataclass(frozen=True, slots=True)
class LatencyWindow:
    """Times to first token of the requests that got one in the last `span_s` seconds, over all gateways.

    `counts[i]` requests were in (bounds_s[i-1], bounds_s[i]]; the last of the len(bounds_s) + 1 counts is beyond all.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[float, ...]
    span_s: float


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """One pool now. `replicas` is the Deployment's spec.replicas, which the decision is relative to."""

    time_s: float
    replicas: int
    pods: tuple[PodObservation, ...] = ()
    queue: QueueSample | None = None
    ttft: LatencyWindow | None = None
    share: float = 1.0
    """The part of the queue that falls to this pool, 0 to 1: its capacity among that of all pools with its model."""
