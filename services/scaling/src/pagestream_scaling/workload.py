"""What arrives and what a pod gets done, learnt from the samples. Work is counted in prompt tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pagestream_scaling.memory import ScalingMemory
from pagestream_scaling.observation import PodSample, QueueSample
from pagestream_scaling.policy import BacklogPolicy
from pagestream_scaling.samples import Believed
from pagestream_scaling.supply import Supply

_ARRIVALS_KEPT = 512  # entries, whatever the window: an exporter that reports ten times a second fills no memory
_CAPACITY_MIN = (
    1.0  # prompt tokens per second; a pod that does less is stuck, and a division by it would order the cluster
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What the backlog term is computed from; rates in prompt tokens per second."""

    arrivals: float  # the level of arrivals: the mean of the short window, or of the longer one if that is higher
    held_for: float  # what capacity is held for: the level with its margin, or with the rises that came before
    capacity: float  # of one pod
    measured: bool  # whether the capacity was measured rather than believed


def throughput(believed: Believed, supply: Supply) -> float | None:
    """Prompt tokens per second that leave the queue; by the pods' own count where the queue has none."""
    if believed.queue is not None and believed.queue.drain_tokens_per_s is not None:
        return believed.queue.drain_tokens_per_s
    rates = [sample.prompt_tokens_per_s for sample in _ready_samples(believed, supply)]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def work_done(believed: Believed, supply: Supply, policy: BacklogPolicy) -> float | None:
    """What the ready pods get done in a second, in prompt tokens computed: a generated one counts as several."""
    known = [
        sample.prompt_tokens_per_s + policy.generated_weight * sample.generated_tokens_per_s
        for sample in _ready_samples(believed, supply)
        if sample.prompt_tokens_per_s is not None and sample.generated_tokens_per_s is not None
    ]
    if not known:
        return throughput(believed, supply)
    return sum(known) / len(known) * len(supply.ready)


def _ready_samples(believed: Believed, supply: Supply) -> list[PodSample]:
    return [believed.samples[pod.name] for pod in supply.ready if pod.name in believed.samples]


def mean_utilization(believed: Believed, supply: Supply) -> float | None:
    """Mean KV utilization of the ready pods whose samples are believed."""
    known = [sample.kv_utilization for sample in _ready_samples(believed, supply)]
    return sum(known) / len(known) if known else None


def with_arrivals(memory: ScalingMemory, believed: Believed, supply: Supply, policy: BacklogPolicy) -> ScalingMemory:
    """Remember the rate at which work arrived since the last queue sample: what left, plus what the backlog grew by."""
    queue = believed.queue
    if queue is None or (memory.queue_time_s is not None and queue.time_s <= memory.queue_time_s):
        return memory
    arrivals = memory.arrivals
    left = throughput(believed, supply) or 0.0
    if memory.queue_time_s is not None:
        grown = (queue.tokens - memory.queue_tokens) / (queue.time_s - memory.queue_time_s)
        arrivals = (*arrivals, (queue.time_s, max(0.0, left + grown)))
    elif left > 0:
        arrivals = ((queue.time_s, left),)  # the first sample: no growth is known yet
    recent = [entry for entry in arrivals if queue.time_s - entry[0] <= policy.arrival_window_s]
    return replace(
        memory,
        arrivals=tuple(recent[-_ARRIVALS_KEPT:]),
        queue_time_s=queue.time_s,
        queue_tokens=queue.tokens,
    )


def with_capacity(
    memory: ScalingMemory, before: ScalingMemory, believed: Believed, supply: Supply, policy: BacklogPolicy
) -> ScalingMemory:
    """Remember what a ready pod does, from a queue sample that is newer than the last one in `before`.

    Nothing of a pod is learnt while the number of ready pods is new: rates lag behind it by their window.
    """
    queue, drained, work = believed.queue, throughput(believed, supply), work_done(believed, supply, policy)
    utilization = mean_utilization(believed, supply)
    if queue is None or memory.queue_time_s == before.queue_time_s:
        return memory
    if drained is None or work is None or utilization is None:
        return memory
    fresh = memory.work_mean is None
    elapsed = math.inf if fresh or before.queue_time_s is None else queue.time_s - before.queue_time_s
    weight = _weight(elapsed, policy.settle_s)
    memory = replace(
        memory,
        drain_total=_mixed(memory.drain_total, drained, weight),
        work_total=_mixed(memory.work_total, work, weight),
    )
    if not fresh and (memory.ready_since_s is None or queue.time_s - memory.ready_since_s < policy.short_window_s):
        return memory
    each = work / len(supply.ready)
    memory = replace(
        memory,
        work_mean=_mixed(memory.work_mean, each, weight),
        utilization_mean=_mixed(memory.utilization_mean, utilization, weight),
    )
    if each > 0 and _is_saturated(queue, drained, policy):
        return replace(memory, capacity=_mixed(memory.capacity, each, weight), capacity_s=queue.time_s)
    return _with_drift(memory, queue.time_s, elapsed, policy)


def _with_drift(memory: ScalingMemory, now_s: float, elapsed: float, policy: BacklogPolicy) -> ScalingMemory:
    """Let a capacity that was not seen at saturation for long go to what the load says: it may have become higher."""
    bound = _capacity_by_load(memory, policy)
    if memory.capacity_s is None:  # never saturated: what the load says, remembered for times without load
        known = (memory.utilization_mean or 0.0) >= policy.evidence_utilization
        return replace(memory, capacity=bound) if known and bound is not None else memory
    if bound is None or now_s - memory.capacity_s < policy.forget_s:
        return memory
    return replace(memory, capacity=_mixed(memory.capacity, bound, _weight(elapsed, policy.forget_s)))


def _weight(elapsed_s: float, constant_s: float) -> float:
    return 1 - math.exp(-elapsed_s / constant_s)


def _mixed(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)


def _is_saturated(queue: QueueSample, rate: float, policy: BacklogPolicy) -> bool:
    """Whether no pod has room: entries wait, and so many that one forgotten entry is not taken for a queue."""
    return queue.age_s > policy.saturated_age_s and queue.tokens > policy.saturated_age_s * rate


def workload(memory: ScalingMemory, supply: Supply, policy: BacklogPolicy) -> Workload:
    """What `memory` says of work and capacity."""
    level = _level(memory, supply.startup_s, policy)
    held_for = max(level / policy.busy, level + _rise(memory, policy))
    return Workload(level, held_for, max(_CAPACITY_MIN, _capacity(memory, policy)), memory.capacity is not None)


def _level(memory: ScalingMemory, startup_s: float, policy: BacklogPolicy) -> float:
    """The rate to expect when a pod ordered now is ready: the further off, the longer the mean that foretells it."""
    if not memory.arrivals:
        return 0.0
    short_s = max(policy.short_window_s, policy.horizon * startup_s)
    long_s = max(policy.level_window_s, short_s)
    mean, mean_short = _mean_of_last(memory, long_s), _mean_of_last(memory, short_s)
    apart_s = max(policy.short_window_s, (long_s - short_s) / 2)
    trend = max(0.0, mean_short - mean) / apart_s * startup_s * policy.trend
    return max(mean, mean_short) + trend


def _mean_of_last(memory: ScalingMemory, span_s: float) -> float:
    newest = memory.arrivals[-1][0]
    rates = [rate for time_s, rate in memory.arrivals if newest - time_s <= span_s]
    return sum(rates) / len(rates)


def _rise(memory: ScalingMemory, policy: BacklogPolicy) -> float:
    """How far above their level rates have been: the quantile of the window. What rose once may do so again."""
    rises = _rises(memory.arrivals, policy.level_window_s)
    return _quantile(rises, policy.arrival_quantile) if rises else 0.0


def _rises(arrivals: tuple[tuple[float, float], ...], span_s: float) -> list[float]:
    """Of each rate above the mean of the `span_s` that end with it, 0 where it was below.

    Only the newest depends on the newest rate, and rises with it.
    """
    found: list[float] = []
    total, first = 0.0, 0
    for index, (time_s, rate) in enumerate(arrivals):
        total += rate
        while time_s - arrivals[first][0] > span_s:
            total -= arrivals[first][1]
            first += 1
        found.append(max(0.0, rate - total / (index + 1 - first)))
    return found


def _quantile(values: list[float], part: float) -> float:
    """Interpolated between the nearest ranks: rises with each of the values, which mean + k deviations would not."""
    ordered = sorted(values)
    position = part * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def _capacity(memory: ScalingMemory, policy: BacklogPolicy) -> float:
    """Queued prompt tokens per second of one pod; see docs/autoscaling.md, "What a pod can do"."""
    bound = _capacity_by_load(memory, policy)
    if bound is None and memory.capacity is None:
        return policy.prior_tokens_per_s
    loaded = (memory.utilization_mean or 0.0) >= policy.evidence_utilization
    done = memory.work_mean or 0.0
    mix = _work_of_token(memory)
    if memory.capacity is None:
        return bound / mix if loaded and bound else max(policy.prior_tokens_per_s, (bound or 0.0) / mix)
    if not loaded or bound is None:
        return max(memory.capacity, done) / mix
    return max(done, bound if memory.capacity_s is None else min(memory.capacity, bound)) / mix


def _work_of_token(memory: ScalingMemory) -> float:
    """The work, answers included, that comes with one queued prompt token, as requests are now."""
    if not memory.work_total or not memory.drain_total:
        return 1.0
    return memory.work_total / memory.drain_total


def _capacity_by_load(memory: ScalingMemory, policy: BacklogPolicy) -> float | None:
    """What a pod would do with its KV pool full, in proportion. An emptier pool than the evidence needs counts as
    that full: no pod is believed to do many times what it was seen doing.
    """
    if not memory.work_mean or memory.utilization_mean is None:
        return None
    return memory.work_mean / max(memory.utilization_mean, policy.evidence_utilization)
