"""Arrivals and a pod's capacity, estimated from the samples. Work is counted in prompt tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pagestream_scaling.memory import ScalingMemory, with_highest
from pagestream_scaling.observation import PodSample, QueueSample, ValidSamples
from pagestream_scaling.policy import BacklogPolicy
from pagestream_scaling.supply import Supply

_ARRIVALS_KEPT = 512
"""Entries, whatever the window, for exporters that report many times a second."""
CAPACITY_MIN = 1.0
"""Prompt tokens per second. A pod that does less is stuck, and dividing by it would order the whole cluster."""
_CONTRADICTION = 4.0
"""Between what another process had measured and what is seen: smoothing would take minutes to come from one to the
other."""
_BELIEVED_MAX = 0.2
"""Part of a capacity that may be belief where it counts as measured."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The input of the backlog term; rates in prompt tokens per second."""

    arrivals: float
    """The level of arrivals: the mean of the short window, or of the longer one if that is higher."""
    held_for: float
    """What capacity is held for: the level with its margin, or with the rises that came before."""
    capacity: float
    """Of one pod."""
    measured: bool
    """Whether the capacity was seen at saturation for long enough, and still holds."""
    requests: int | None
    """Most requests queued or running of late: more pods could not work at once. None: unknown, as in the first minutes
    after a restart."""
    work_of_token: float = 1.0
    """Work, answers included, that came with one queued prompt token of late; 1: unknown."""
    proven: float | None = None
    """Most that a pod has done so far, in queued prompt tokens per second; None: unknown."""
    rise: float = 0.0
    """How far arrivals of all pools rose above their level of late."""


def throughput(valid: ValidSamples, supply: Supply) -> float | None:
    """Prompt tokens per second that leave the queue; by the pods' own count where the queue has none."""
    if valid.queue is not None and valid.queue.drain_tokens_per_s is not None:
        return valid.queue.drain_tokens_per_s
    rates = [sample.prompt_tokens_per_s for sample in _ready_samples(valid, supply)]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def own_throughput(valid: ValidSamples, supply: Supply) -> float | None:
    """The part of it that falls to this pool."""
    drained = throughput(valid, supply)
    is_of_all = valid.queue is not None and valid.queue.drain_tokens_per_s is not None
    return drained * valid.share if drained is not None and is_of_all else drained


def divisible_tokens(queue: QueueSample, most_each: float) -> float:
    """Queued prompt tokens, of each prompt at most `most_each`: a prompt is computed by one pod.

    Only the largest one's size is known. Of the others the mean counts.
    """
    if queue.depth <= 0:
        return queue.tokens
    excess = max(0.0, (queue.longest_tokens or 0.0) - most_each)
    return min(max(0.0, queue.tokens - excess), queue.depth * most_each)


def output_factor(queue: QueueSample, work: Workload, policy: BacklogPolicy) -> float:
    """Return the work of what waits, over that of as many prompt tokens of the requests of late.

    A backlog of long answers takes longer than its prompts show. At most the policy's bound, since both are estimates;
    never below 1, and 1 where either is unknown.
    """
    if not queue.output_tokens or queue.tokens <= 0 or work.work_of_token <= 1.0:
        return 1.0
    expected = 1.0 + policy.generated_weight * queue.output_tokens / queue.tokens
    return min(policy.output_factor_max, max(1.0, expected / work.work_of_token))


def work_done(valid: ValidSamples, supply: Supply, policy: BacklogPolicy) -> float | None:
    """Work of the ready pods per second, in computed prompt tokens: a generated token counts as several."""
    known = [
        sample.prompt_tokens_per_s + policy.generated_weight * sample.generated_tokens_per_s
        for sample in _ready_samples(valid, supply)
        if sample.prompt_tokens_per_s is not None and sample.generated_tokens_per_s is not None
    ]
    if not known:
        return own_throughput(valid, supply)
    return sum(known) / len(known) * len(supply.ready)


def _ready_samples(valid: ValidSamples, supply: Supply) -> list[PodSample]:
    return [valid.samples[pod.name] for pod in supply.ready if pod.name in valid.samples]


def mean_utilization(valid: ValidSamples, supply: Supply) -> float | None:
    """Mean KV utilization of the ready pods whose samples are valid."""
    known = [sample.kv_utilization for sample in _ready_samples(valid, supply)]
    return sum(known) / len(known) if known else None


def with_arrivals(memory: ScalingMemory, valid: ValidSamples, supply: Supply, policy: BacklogPolicy) -> ScalingMemory:
    """Remember the rate at which work arrived since the last queue sample: what left, plus what the backlog grew by."""
    queue = valid.queue
    if queue is None or (memory.queue_time_s is not None and queue.time_s <= memory.queue_time_s):
        return memory
    arrivals = memory.arrivals
    left = throughput(valid, supply) or 0.0
    each = max(CAPACITY_MIN, _capacity(memory, policy))
    left -= max(0.0, (queue.drain_longest_per_s or 0.0) - each * policy.prompt_s / policy.short_window_s)
    drained_part = weighted_drain(queue, policy)
    left *= 1.0 if drained_part is None else drained_part
    tokens = divisible_tokens(queue, each * policy.prompt_s) * weighted_part(queue, policy)
    if memory.queue_time_s is not None:
        grown = (tokens - memory.queue_tokens) / (queue.time_s - memory.queue_time_s)
        arrivals = (*arrivals, (queue.time_s, max(0.0, left + grown)))
    elif left > 0:
        arrivals = ((queue.time_s, left),)  # the first sample: no growth is known yet
    recent = [entry for entry in arrivals if queue.time_s - entry[0] <= policy.arrival_window_s]
    elapsed = math.inf if memory.queue_time_s is None else queue.time_s - memory.queue_time_s
    if drained_part is not None:
        weight = _weight(elapsed, policy.settle_s)
        memory = replace(memory, drained_part=_mixed(memory.drained_part, drained_part, weight))
    return replace(
        memory,
        arrivals=tuple(recent[-_ARRIVALS_KEPT:]),
        queue_time_s=queue.time_s,
        queue_tokens=tokens,
        requests_high=with_highest(
            memory.requests_high, queue.time_s, math.ceil(queue.depth + queue.running), policy.arrival_window_s
        ),
    )


def with_capacity(
    memory: ScalingMemory, before: ScalingMemory, valid: ValidSamples, supply: Supply, policy: BacklogPolicy
) -> ScalingMemory:
    """Remember what a ready pod does, from a queue sample that is newer than the last one in `before`.

    Nothing is learnt about a pod while the number of ready pods is new: rates lag behind it by their window.
    """
    queue, drained, work = valid.queue, own_throughput(valid, supply), work_done(valid, supply, policy)
    utilization = mean_utilization(valid, supply)
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
    work_mean = _mixed(memory.work_mean, each, weight)
    memory = replace(
        memory,
        work_mean=work_mean,
        work_high=_work_high(memory, work_mean, queue.time_s, policy),
        utilization_mean=_mixed(memory.utilization_mean, utilization, weight),
    )
    if each > 0 and _is_saturated(queue, throughput(valid, supply) or 0.0, policy):
        # The first sample of a process may be of pods that have just come: it is worth less than what was measured.
        return memory if fresh and is_measured(memory, policy) else _with_saturated(memory, each, weight, policy)
    memory = replace(memory, saturated_since_s=None, saturated_samples=0)
    return _with_drift(memory, queue.time_s, elapsed, policy)


def _work_high(memory: ScalingMemory, work_mean: float, now_s: float, policy: BacklogPolicy) -> float | None:
    """The most work of a pod so far; the first samples are no mean yet."""
    if memory.started_s is None or now_s - memory.started_s < policy.settle_s:
        return memory.work_high
    return max(work_mean, memory.work_high or 0.0)


def _with_saturated(memory: ScalingMemory, each: float, weight: float, policy: BacklogPolicy) -> ScalingMemory:
    """Learn from a sample at saturation: smooth a measured capacity, move a believed one, and replace a believed one by
    the mean of a saturation that has lasted.
    """
    now_s = memory.queue_time_s or 0.0
    since_s = now_s if memory.saturated_since_s is None else memory.saturated_since_s
    samples = memory.saturated_samples + 1
    mean = _mixed(memory.saturated_mean if memory.saturated_samples else None, each, 1 / samples)
    holds = _holds(memory, policy)
    lasts = now_s - since_s >= policy.measure_s
    replaced = lasts and (not is_measured(memory, policy) or _contradicts(mean, memory.inherited))
    return replace(
        memory,
        saturated_since_s=since_s,
        saturated_samples=samples,
        saturated_mean=mean,
        capacity=mean if replaced else _mixed(memory.capacity, each, weight),
        capacity_s=now_s,
        believed=0.0 if replaced else (memory.believed if holds else 1.0) * (1 - weight),
        inherited=None if lasts else memory.inherited,
    )


def _contradicts(mean: float, inherited: float | None) -> bool:
    """Whether what pods do at saturation can't be what another process had measured."""
    return inherited is not None and not inherited / _CONTRADICTION < mean < inherited * _CONTRADICTION


def is_measured(memory: ScalingMemory, policy: BacklogPolicy) -> bool:
    """Whether the capacity was seen at saturation for long enough that little of a belief is left, and still holds."""
    return memory.believed <= _BELIEVED_MAX and _holds(memory, policy)


def _holds(memory: ScalingMemory, policy: BacklogPolicy) -> bool:
    if memory.capacity is None or memory.capacity_s is None:
        return False
    return memory.queue_time_s is None or memory.queue_time_s - memory.capacity_s < policy.forget_s


def _with_drift(memory: ScalingMemory, now_s: float, elapsed: float, policy: BacklogPolicy) -> ScalingMemory:
    """Move a capacity that was long not seen at saturation towards the estimate from load: it may have risen."""
    bound = _capacity_by_load(memory, policy)
    if memory.capacity_s is None:  # never saturated: keep the estimate from load for times without load
        known = (memory.utilization_mean or 0.0) >= policy.evidence_utilization
        return replace(memory, capacity=bound) if known and bound is not None else memory
    if bound is None or now_s - memory.capacity_s < policy.forget_s or math.isinf(elapsed):
        return memory
    return replace(memory, capacity=_mixed(memory.capacity, bound, _weight(elapsed, policy.forget_s)))


def _weight(elapsed_s: float, constant_s: float) -> float:
    return 1 - math.exp(-elapsed_s / constant_s)


def _mixed(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)


def _is_saturated(queue: QueueSample, rate: float, policy: BacklogPolicy) -> bool:
    """Whether no pod has room: entries wait, and so many that one forgotten or long entry is not taken for a queue."""
    others = queue.tokens - (queue.longest_tokens or 0.0)
    return queue.age_s > policy.saturated_age_s and others > policy.saturated_age_s * rate


def workload(memory: ScalingMemory, supply: Supply, policy: BacklogPolicy, share: float = 1.0) -> Workload:
    """Estimate arrivals, of which `share` falls to this pool, and capacity from what is remembered."""
    level = _level(memory, supply.startup_s, policy) * share
    rise = _rise(memory, policy)
    held_for = max(level / policy.busy, level + rise * share)
    return Workload(
        arrivals=level,
        held_for=held_for,
        capacity=max(CAPACITY_MIN, _capacity(memory, policy)),
        measured=is_measured(memory, policy),
        requests=None if _is_resumed(memory) or not memory.requests_high else memory.requests_high[0][1],
        work_of_token=_work_of_token(memory),
        proven=memory.work_high / _work_of_token(memory) if memory.work_high else None,
        rise=rise,
    )


def _level(memory: ScalingMemory, startup_s: float, policy: BacklogPolicy) -> float:
    """The rate to expect when a pod ordered now is ready: the further off, the longer the mean that predicts it."""
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
    """How far above their level rates have been: the quantile of the window. What rose once may do so again.

    Where this process has not watched for a whole window, what an earlier one saw counts as well, and nothing is
    forgotten yet.
    """
    rises = _rises(memory.arrivals, policy.level_window_s)
    own = _quantile(rises, policy.arrival_quantile) if rises else 0.0
    return max(own, memory.earlier_rise, memory.rise or 0.0) if _is_resumed(memory) else own


def _is_resumed(memory: ScalingMemory) -> bool:
    """Whether this process has watched arrivals for less than a window, and an earlier one saw those before."""
    until_s = memory.earlier_rise_until_s
    return until_s is not None and bool(memory.arrivals) and memory.arrivals[-1][0] < until_s


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


def work_capacity(memory: ScalingMemory, policy: BacklogPolicy) -> float | None:
    """Work per second that one pod can do, in computed prompt tokens; None before anything was measured."""
    bound = _capacity_by_load(memory, policy)
    if memory.capacity is None or bound is None:
        return memory.capacity if bound is None else bound
    return memory.capacity if memory.capacity_s is not None else bound


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
    that full: no pod is assumed to do many times what it has done.
    """
    if not memory.work_mean or memory.utilization_mean is None:
        return None
    return memory.work_mean / max(memory.utilization_mean, policy.evidence_utilization)


# -- Queued work by priority class: how much of it counts. docs/autoscaling.md, "Classes".


def weighted_part(queue: QueueSample, policy: BacklogPolicy) -> float:
    """Return the part of the queued tokens that counts, 0 to 1. What belongs to no known class counts in full."""
    return _part(queue.tokens, [(_weight_of(each.name, policy), each.tokens) for each in queue.classes])


def weighted_drain(queue: QueueSample, policy: BacklogPolicy) -> float | None:
    """Return the part of the claimed tokens that counts, 0 to 1; None while nothing is claimed."""
    if not queue.drain_tokens_per_s:
        return None
    rates = [(_weight_of(each.name, policy), each.drain_tokens_per_s) for each in queue.classes]
    return _part(queue.drain_tokens_per_s, rates)


def weighted_age(queue: QueueSample, policy: BacklogPolicy) -> float:
    """Return the longest wait of a class' oldest request, times the class' weight. Without classes the age itself."""
    if not queue.classes:
        return queue.age_s
    return max(_weight_of(each.name, policy) * each.age_s for each in queue.classes)


def _weight_of(name: str, policy: BacklogPolicy) -> float:
    if not name.isdecimal():
        return 1.0  # begun requests, whatever their class: their clients have a part of the answer
    return policy.class_weights[min(int(name), len(policy.class_weights) - 1)]


def _part(total: float, amounts: list[tuple[float, float]]) -> float:
    known = sum(amount for _, amount in amounts)
    whole = max(total, known)
    if whole <= 0:
        return 1.0
    return (whole - known + sum(weight * amount for weight, amount in amounts)) / whole
