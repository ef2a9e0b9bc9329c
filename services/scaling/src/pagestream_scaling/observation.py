"""The input of the law: one pool at one moment, and which of its samples are valid. Times are Unix seconds.

Valid are samples that are recent, finite and possible. The others count as missing, which never removes a pod.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pagestream_scaling.policy import SamplesPolicy


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


_NAMED_PODS = 5
"""Pods with the same trouble that are named; the others are counted, since the decision goes into a status."""
_ROUNDING = 1e-6
"""A ratio of two counts that were read one after the other may exceed 1 by so much."""


@dataclass(frozen=True, slots=True)
class ValidSamples:
    """The valid samples of an observation: by pod name, of the queue and of latencies; and what is missing."""

    samples: Mapping[str, PodSample]
    queue: QueueSample | None
    ttft: LatencyWindow | None
    ttft_absurd: bool
    missing: tuple[str, ...]
    share: float = 1.0
    """Of the queue; 1 where it is absurd."""


def valid_samples(observation: PoolObservation, policy: SamplesPolicy) -> ValidSamples:
    """Separate the valid samples of an observation from what is missing, old or absurd."""
    samples: dict[str, PodSample] = {}
    troubles: dict[str, list[str]] = {}
    for pod in observation.pods:
        trouble = _pod_trouble(pod, observation.time_s, policy)
        if trouble is None and pod.sample is not None:
            samples[pod.name] = pod.sample
        elif trouble is not None and pod.state is PodState.READY:
            troubles.setdefault(trouble, []).append(pod.name)
    missing = [_phrase(trouble, names) for trouble, names in troubles.items()]
    queue = observation.queue
    queue_trouble = _queue_trouble(queue, observation.time_s, policy)
    if queue_trouble is not None:
        queue = None
        missing.append(f"{queue_trouble} for the queue")
    ttft = observation.ttft
    absurd = ttft is not None and not _latencies_hold(ttft)
    if absurd:
        ttft = None
        missing.append("an absurd histogram of the time to first token")
    share = observation.share if 0 <= observation.share <= 1 else 1.0
    return ValidSamples(samples, queue, ttft, absurd, tuple(missing), share)


def _phrase(trouble: str, names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED_PODS])
    more = f" and {len(names) - _NAMED_PODS} more" if len(names) > _NAMED_PODS else ""
    return f"{trouble} for {shown}{more}"


def _time_trouble(time_s: float, now_s: float, policy: SamplesPolicy) -> str | None:
    if not math.isfinite(time_s):
        return "a sample without a time"
    if time_s > now_s + policy.future_s:
        return f"a sample from more than {policy.future_s:g} s in the future"
    if time_s < now_s - policy.stale_s:
        return f"no sample for more than {policy.stale_s:g} s"
    return None


def _is_amount(value: float | None) -> bool:
    return value is None or (math.isfinite(value) and value >= 0)


def _pod_trouble(pod: PodObservation, now_s: float, policy: SamplesPolicy) -> str | None:
    sample = pod.sample
    if sample is None:
        return "no sample yet"
    late = _time_trouble(sample.time_s, now_s, policy)
    if late is not None:
        return late
    if not 0 <= sample.kv_utilization <= 1 + _ROUNDING:  # also refuses NaN
        return f"an absurd KV utilization ({sample.kv_utilization:g})"
    amounts = (sample.running, sample.waiting, sample.prompt_tokens_per_s, sample.generated_tokens_per_s)
    if not all(map(_is_amount, amounts)):
        return "an absurd count"
    return None


def _queue_trouble(queue: QueueSample | None, now_s: float, policy: SamplesPolicy) -> str | None:
    if queue is None:
        return "no sample yet"
    late = _time_trouble(queue.time_s, now_s, policy)
    if late is not None:
        return late
    amounts = (
        queue.depth,
        queue.tokens,
        queue.age_s,
        queue.running,
        queue.drain_tokens_per_s,
        queue.longest_tokens,
        queue.output_tokens,
        queue.drain_longest_per_s,
        *(amount for each in queue.classes for amount in (each.tokens, each.age_s, each.drain_tokens_per_s)),
    )
    return None if all(map(_is_amount, amounts)) else "an absurd sample"


def _latencies_hold(window: LatencyWindow) -> bool:
    rising = all(low < high for low, high in zip(window.bounds_s, window.bounds_s[1:], strict=False))
    return (
        rising
        and all(math.isfinite(bound) for bound in window.bounds_s)
        and len(window.counts) == len(window.bounds_s) + 1
        and all(map(_is_amount, window.counts))
        and math.isfinite(window.span_s)
        and window.span_s > 0
    )
