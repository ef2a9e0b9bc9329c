"""The pods that serve, and those that are starting and will."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from pagestream_scaling.memory import ScalingMemory
from pagestream_scaling.observation import PodObservation, PodState, PoolObservation, ValidSamples
from pagestream_scaling.policy import StartupPolicy

_STARTUPS_KEPT = 16
"""The last start-ups; the median of so many ignores a slow node."""
_LOST_KEPT = 256
"""Pods that have lost their readiness at one time."""
_STARTUP_MAX_S = 3600.0
"""A pod that became ready later than this waited for something else than its start."""


@dataclass(frozen=True, slots=True)
class Supply:
    """The pods of a pool, by whether they serve, will serve, or should have by now."""

    ready: tuple[PodObservation, ...]
    arriving_s: tuple[float, ...]
    """Seconds from now until each credited starting pod is expected to be ready, >= 0."""
    overdue: int
    """Started or ordered so long ago that they aren't counted on any more."""
    startup_s: float
    """Creation to ready: the measured median, or the policy's prior."""
    lost: int = 0
    """Pods that were ready once and aren't now: their requests come back."""

    @property
    def expected(self) -> int:
        """Number of pods that serve or are expected to."""
        return len(self.ready) + len(self.arriving_s)


def startup_time(memory: ScalingMemory, policy: StartupPolicy) -> float:
    """Seconds from creation to ready: the median of the start-ups seen, or the policy's prior."""
    if not memory.startups:
        return policy.prior_s
    return statistics.median(seconds for _, seconds in memory.startups)


def with_startups(memory: ScalingMemory, observation: PoolObservation) -> ScalingMemory:
    """Remember the start-ups of pods that became ready since the last observation, each once.

    A pod that comes back after it had lost its readiness says nothing about starting.
    """
    states = {pod.name: pod for pod in observation.pods}
    lost = {name for name in memory.lost if name in states} | {
        pod.name for pod in observation.pods if pod.state is PodState.STARTING and _has_served(pod)
    }
    until = -math.inf if memory.startups_until_s is None else memory.startups_until_s
    seen = [
        (pod.ready_s, pod.name, taken)
        for pod in observation.pods
        if pod.state is PodState.READY and pod.name not in lost and (taken := _startup_of(pod)) is not None
        if pod.ready_s is not None and pod.ready_s >= until
    ]
    known = {name for name, _ in memory.startups}
    fresh = [(name, taken) for _, name, taken in sorted(seen) if name not in known]
    return replace(
        memory,
        lost=tuple(sorted(lost))[:_LOST_KEPT],
        startups=(*memory.startups, *fresh)[-_STARTUPS_KEPT:],
        startups_until_s=max((ready_s for ready_s, _, _ in seen), default=memory.startups_until_s),
    )


def _has_served(pod: PodObservation) -> bool:
    """Whether the pod was ready once: an engine exports its start-up time from its first claim on."""
    sample = pod.sample
    return pod.ready_s is not None or (sample is not None and (sample.startup_s is not None or sample.running > 0))


def _startup_of(pod: PodObservation) -> float | None:
    if pod.ready_s is None or not math.isfinite(pod.ready_s) or not math.isfinite(pod.created_s):
        return None
    taken = pod.ready_s - pod.created_s
    return taken if 0 < taken <= _STARTUP_MAX_S else None


def supply(observation: PoolObservation, valid: ValidSamples, memory: ScalingMemory, policy: StartupPolicy) -> Supply:
    """Sort the pods. Replicas without a pod yet count as starting since they were ordered."""
    startup_s = startup_time(memory, policy)
    patience_s = max(policy.overdue_min_s, policy.overdue_factor * startup_s)
    now = observation.time_s
    ready = tuple(pod for pod in observation.pods if pod.state is PodState.READY and not _drains(pod, valid))
    starting = [pod.created_s for pod in observation.pods if pod.state is PodState.STARTING]
    draining = sum(pod.state is PodState.READY for pod in observation.pods) - len(ready)
    unseen = max(0, observation.replicas - len(ready) - len(starting) - draining)
    starting += [_ordered_at(observation, memory)] * unseen
    on_time = [since for since in starting if -patience_s <= now - since <= patience_s]
    arriving = tuple(sorted(min(startup_s, max(0.0, since + startup_s - now)) for since in on_time))
    lost = sum(pod.state is PodState.STARTING and pod.name in memory.lost for pod in observation.pods)
    return Supply(ready, arriving, len(starting) - len(arriving), startup_s, lost)


def _drains(pod: PodObservation, valid: ValidSamples) -> bool:
    sample = valid.samples.get(pod.name)
    return sample is not None and sample.draining


def _ordered_at(observation: PoolObservation, memory: ScalingMemory) -> float:
    rising = memory.replicas is None or observation.replicas > memory.replicas
    if rising or memory.raised_s is None:
        return observation.time_s
    return memory.raised_s
