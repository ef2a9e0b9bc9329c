"""What the law remembers from one decision to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Window: TypeAlias = tuple[tuple[float, int], ...]
"""The highest or lowest values of the last seconds, as (Unix seconds, value), oldest first.

An entry that a later one makes irrelevant is dropped at once: for the highest, every earlier entry that isn't higher.
What is left is strictly falling (or rising), so a window never has more entries than there are different values.
"""


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """The state of the law, immutable: `decide` returns the next one.

    A fresh one is right about scaling out, and holds scale-in for a window. Times are Unix seconds. Its size is
    bounded: `arrivals` by the policy's window and 512 entries, the windows by the number of different replica counts.
    """

    started_s: float | None = None
    """When it began to remember; None before the first decision."""
    time_s: float | None = None
    """When the last decision was made."""
    # -- work
    queue_time_s: float | None = None
    """Time of the last valid queue sample."""
    queue_tokens: float = 0.0
    """Prompt tokens that waited then, of long prompts what counts as arriving load."""
    requests_high: Window = ()
    """Most requests queued or owned by engines in the arrival window."""
    arrivals: tuple[tuple[float, float], ...] = ()
    """(time, prompt tokens per second), one for each queue sample."""
    drained_part: float | None = None
    """Smoothed part of the claimed tokens that counts by class weights; None: nothing was claimed yet."""
    kv_sums: tuple[tuple[float, float], ...] = ()
    """(time, KV utilization added over the ready pods)."""
    drain_total: float | None = None
    """Smoothed prompt tokens per second that leave the queue."""
    work_total: float | None = None
    """Smoothed work per second of all pods."""
    work_mean: float | None = None
    """Smoothed work per second of one ready pod."""
    utilization_mean: float | None = None
    """Smoothed mean KV utilization of ready pods."""
    capacity: float | None = None
    """Work per second that a pod can do."""
    capacity_s: float | None = None
    """When that was last seen at saturation; None: it is estimated from load."""
    believed: float = 1.0
    """The part of it that is still what was believed before, 0 to 1."""
    inherited: float | None = None
    """What another process had measured, until a saturation that lasted has confirmed or replaced it."""
    saturated_since_s: float | None = None
    """Since when every sample was one at saturation; None: the last wasn't."""
    saturated_samples: int = 0
    """Their number."""
    saturated_mean: float = 0.0
    """Their mean work per second of one pod."""
    work_high: float | None = None
    """Most work per second of one ready pod so far, smoothed."""
    rise: float | None = None
    """How far arrivals rose above their level of late, by the last decision."""
    earlier_rise: float = 0.0
    """The same, as an earlier process saw it."""
    earlier_rise_until_s: float | None = None
    """Until when that counts."""
    # -- pods
    startups: tuple[tuple[str, float], ...] = ()
    """(pod, seconds from creation to ready) of the last ones seen."""
    startups_until_s: float | None = None
    """When the last of them became ready."""
    lost: tuple[str, ...] = ()
    """Pods that were ready once and aren't now: their next readiness is no start-up."""
    replicas: int | None = None
    """Replicas of the last observation."""
    ready: int | None = None
    """Ready pods of the last observation."""
    ready_since_s: float | None = None
    """Since when there have been so many."""
    raised_s: float | None = None
    """When the replicas last rose."""
    lowered_s: float | None = None
    """When they last fell."""
    # -- windows
    needs: Window = ()
    """Lowest need, for stabilisation up."""
    floors: Window = ()
    """Highest floor, for stabilisation down."""
    panic_needs: Window = ()
    """Lowest need, for panic."""
    ready_low: Window = ()
    """Fewest ready pods, for the TTFT term."""
    replicas_low: Window = ()
    """Fewest replicas, for the rate limit up."""
    replicas_high: Window = ()
    """Most replicas, for the rate limit down."""
    # -- states
    panic_until_s: float | None = None
    idle_since_s: float | None = None


def _recent(window: Window, now_s: float, span_s: float) -> Window:
    return tuple(entry for entry in window if now_s - entry[0] <= span_s)


def with_highest(window: Window, now_s: float, value: int, span_s: float) -> Window:
    """Add `value` at `now_s`; the first entry of the result is the highest of the last `span_s` seconds."""
    return (*(entry for entry in _recent(window, now_s, span_s) if entry[1] > value), (now_s, value))


def with_lowest(window: Window, now_s: float, value: int, span_s: float) -> Window:
    """Add `value` at `now_s`; the first entry of the result is the lowest of the last `span_s` seconds."""
    return (*(entry for entry in _recent(window, now_s, span_s) if entry[1] < value), (now_s, value))
