"""What the law is shown: one pool at one moment. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PodState(StrEnum):
    """Where an engine pod is in its life, as Kubernetes shows it."""

    STARTING = "starting"  # created (or still to be scheduled), not yet ready for the first time, or not ready now
    READY = "ready"
    DRAINING = "draining"  # told to end: it hands its requests back and takes no new ones


@dataclass(frozen=True, slots=True)
class PodSample:
    """What one engine last said of itself. Nothing is checked here; the law ignores samples that can't be true."""

    time_s: float  # when it was measured, by the pod's clock
    kv_utilization: float  # referenced blocks / all blocks, 0 to 1
    running: float  # requests in the running batch
    waiting: float  # requests that the engine holds but does not run
    prompt_tokens_per_s: float | None = None  # computed prompt tokens; None before two samples
    generated_tokens_per_s: float | None = None
    startup_s: float | None = None  # process start to ready, as the engine measured it
    draining: bool = False  # the engine itself says that it is draining


@dataclass(frozen=True, slots=True)
class PodObservation:
    """One pod. `sample` is the newest one that came, however old; None if none ever did."""

    name: str
    state: PodState
    created_s: float  # the pod's creation timestamp
    ready_s: float | None = None  # when it first became ready; None if it never was or nobody saw it
    sample: PodSample | None = None


@dataclass(frozen=True, slots=True)
class QueueSample:
    """The model's queue, over all partitions and classes. The same global truth whichever gateway reports it."""

    time_s: float
    depth: float  # requests waiting
    tokens: float  # their prompt tokens
    age_s: float  # of the oldest that waits; 0 if none does
    running: float  # requests owned by engines
    drain_tokens_per_s: float | None = (
        None  # prompt tokens claimed by engines per second; None if it was never measured
    )


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
    """One pool now. `replicas` is what the Deployment was last told to have, which the decision is relative to."""

    time_s: float
    replicas: int
    pods: tuple[PodObservation, ...] = ()
    queue: QueueSample | None = None
    ttft: LatencyWindow | None = None
