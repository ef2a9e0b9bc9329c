"""The terms of the scaling law, derived in docs/autoscaling.md: what each gets, what it answers, and what it computes.

The highest need of all of them counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pagestream_scaling.decision import Limit
from pagestream_scaling.memory import ScalingMemory
from pagestream_scaling.observation import LatencyWindow, ValidSamples
from pagestream_scaling.policy import ScalingPolicy, TtftPolicy
from pagestream_scaling.supply import Supply
from pagestream_scaling.workload import Workload, divisible_tokens, output_factor, weighted_age, weighted_part

_ROUNDING = 1e-9
"""0.8 * 3 / 0.8 is a little more than 3."""
_MOST = 1_000_000
"""Pods; keeps a need finite."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What terms compute from."""

    policy: ScalingPolicy
    replicas: int
    valid: ValidSamples
    supply: Supply
    workload: Workload
    ready_low: int
    """Fewest ready pods of the TTFT window."""
    ready_for_s: float
    """Seconds for which as many pods have been ready as now."""
    kv_sum: float
    """KV utilization added over the pods, smoothed."""
    counted_part: float = 1.0
    """The part of what engines claimed of late that counts by class weights."""


@dataclass(frozen=True, slots=True)
class Term:
    """The answer of one term: how many serving pods it asks for, 0 <= need <= floor."""

    limit: Limit
    need: int
    """Pods that what is known requires."""
    floor: int
    """Pods that might be required, with the worst in place of what is missing."""
    sentence: str
    """Why it asks for so many, with its numbers: the reason that a decision shows where this term decides."""
    inputs: dict[str, float] = field(default_factory=dict)


def pods_for(amount: float) -> int:
    """Round up to whole pods."""
    return min(_MOST, max(0, math.ceil(min(amount, float(_MOST)) - _ROUNDING)))


# -- (a): how full the pods' KV pools are. The demand is smoothed, since a peak is over before a pod that was ordered
# for it is ready.

_SUMS_KEPT = 256


def kv_utilization_term(situation: Situation) -> Term:
    """Pods that hold the KV demand at the target; fewer only below `low`, and only as many as stay under the target."""
    policy, ready = situation.policy.kv_utilization, situation.supply.ready
    known = [situation.valid.samples[pod.name].kv_utilization for pod in ready if pod.name in situation.valid.samples]
    total = sum(known)
    silent = len(ready) - len(known) + situation.supply.lost  # for the floor they count as full
    counted = max(1, len(known) + silent)
    need = pods_for(situation.kv_sum * situation.counted_part / policy.target)
    is_low = (situation.kv_sum + silent) / counted < policy.low and (total + silent) / counted <= policy.target
    floor = pods_for((situation.kv_sum + silent) / policy.target) if is_low else situation.replicas
    mean = total / len(known) if known else 0.0
    sentence = (
        f"KV utilization was {situation.kv_sum / max(1, len(ready)):.2f} of late, {mean:.2f} now, over {len(known)} of "
        f"{len(ready)} ready pods, target {policy.target:.2f}: {need} needed"
    )
    inputs = {"kv_utilization": mean, "kv_utilization_sum": situation.kv_sum}
    return Term(Limit.KV_UTILIZATION, need, max(need, floor), sentence, inputs)


def with_kv_sum(
    memory: ScalingMemory, now_s: float, valid: ValidSamples, supply: Supply, policy: ScalingPolicy
) -> ScalingMemory:
    """Remember the KV utilization added over the pods: the demand in pods, whatever their number is."""
    total = sum(valid.samples[pod.name].kv_utilization for pod in supply.ready if pod.name in valid.samples)
    span_s = max(policy.kv_utilization.window_s, policy.kv_utilization.horizon * supply.startup_s)
    recent = [entry for entry in memory.kv_sums if now_s - entry[0] < span_s]
    return replace(memory, kv_sums=(*recent[1 - _SUMS_KEPT :], (now_s, total)))


def mean_kv_sum(memory: ScalingMemory) -> float:
    """The mean over the remembered decisions, this one included."""
    return sum(total for _, total in memory.kv_sums) / len(memory.kv_sums)


# -- (b): work that arrives and waits


def backlog_term(situation: Situation) -> Term:
    """Pods for the work that arrives, and for the backlog that is left when a pod ordered now is ready."""
    policy, work, queue = situation.policy.backlog, situation.workload, situation.valid.queue
    part = weighted_part(queue, policy) * situation.valid.share if queue is not None else 1.0
    part *= output_factor(queue, work, policy) if queue is not None else 1.0
    tokens = queue.tokens * part if queue is not None else 0.0
    drain_s = _drain_s(situation)
    divisible = divisible_tokens(queue, work.capacity * drain_s) * part if queue is not None else 0.0
    left = _left_at_horizon(divisible, situation.supply, work)
    need = pods_for((work.held_for + left / drain_s) / work.capacity)
    if work.requests is not None:
        need = min(need, work.requests)
    wait_s = tokens / (work.capacity * len(situation.supply.ready)) if situation.supply.ready else 0.0
    keeps_up = queue is not None and (
        tokens <= 0 or (wait_s <= policy.oldest_age_s and len(situation.supply.ready) > 0)
    )
    floor = need if keeps_up else situation.replicas
    believed = "measured" if work.measured else "believed"
    sentence = (
        f"{work.arrivals:.0f} prompt tokens/s arrive, capacity is held for {work.held_for:.0f}/s, {tokens:.0f} wait, "
        f"a pod does {work.capacity:.0f}/s ({believed}): {need} needed"
    )
    inputs = {
        "arrivals": work.arrivals,
        "arrivals_high": work.held_for,
        "backlog_tokens": tokens,
        "backlog_left": left,
        "capacity": work.capacity,
        "predicted_wait_s": wait_s,
        "startup_s": situation.supply.startup_s,
    }
    return Term(Limit.BACKLOG, need, max(need, floor), sentence, inputs)


def _drain_s(situation: Situation) -> float:
    """Seconds that a backlog may take once the pods for it are ready."""
    policy = situation.policy.backlog
    return max(policy.drain_s, policy.drain_startups * situation.supply.startup_s)


def _left_at_horizon(tokens: float, supply: Supply, work: Workload) -> float:
    """Prompt tokens that still wait when a pod ordered now is ready. Starting pods work from when they are ready."""
    pod_seconds = len(supply.ready) * supply.startup_s + sum(supply.startup_s - s for s in supply.arriving_s)
    return max(0.0, tokens + work.arrivals * supply.startup_s - pod_seconds * work.capacity)


def age_term(situation: Situation) -> Term:
    """Pods for an oldest request that has waited too long. It needs no estimate of a pod's capacity.

    It asks once, waits until the pods that it asked for are ready, and then for the time that a backlog may take. It
    asks for no more pods in addition than requests wait.
    """
    policy, queue, ready = situation.policy.backlog, situation.valid.queue, len(situation.supply.ready)
    age_s = weighted_age(queue, policy) if queue is not None and queue.depth > 0 else 0.0
    late = age_s > policy.oldest_age_s
    factor = min(policy.age_factor_max, age_s / policy.oldest_age_s)
    waits = bool(situation.supply.arriving_s) or (ready > 0 and situation.ready_for_s < _drain_s(situation))
    wanted = max(1, min(pods_for(ready * factor), ready + pods_for(queue.depth))) if queue is not None else 0
    need = 0 if not late else situation.supply.expected if waits else wanted
    sentence = f"the oldest request has waited {age_s:.1f} s, at most {policy.oldest_age_s:g} s wanted: {need} needed"
    return Term(Limit.AGE, need, max(need, situation.replicas) if late else 0, sentence, {"queue_age_s": age_s})


def work_term(situation: Situation) -> Term:
    """One pod where there is any work: at once from zero, and never to zero before it is done."""
    queue = situation.valid.queue if situation.valid.share > 0 else None
    queued = queue is not None and (queue.depth > 0 or queue.tokens > 0)
    running = (queue is not None and queue.running > 0) or any(
        sample.running + sample.waiting > 0 for sample in situation.valid.samples.values()
    )
    need = 1 if queued or running else 0
    depth = queue.depth if queue is not None else 0.0
    owned = queue.running if queue is not None else 0.0
    sentence = f"{depth:.0f} requests wait and {owned:.0f} run: {need} needed"
    return Term(Limit.WORK, need, need, sentence, {"queue_depth": depth, "queue_running": owned})


# -- (c): the objective for the time to first token

_HALF = 0.5
"""Requests; keeps a tail from ending at a bucket's bound."""


def ttft_term(situation: Situation) -> Term:
    """Pods for a missed TTFT objective, if requests wait: if none does, more pods would not make it faster."""
    policy, window = situation.policy.ttft, situation.valid.ttft
    total, misses = (0.0, 0.0) if window is None else (sum(window.counts), missed(window, policy.objective_s))
    inputs = {"ttft_requests": total, "ttft_missed": misses}
    share = misses / total if total > 0 else 0.0
    allowed = 1 - policy.attainment
    is_missed = total >= policy.min_requests and misses >= policy.min_misses and share > allowed
    if situation.valid.ttft_absurd:
        return Term(Limit.TTFT, 0, situation.replicas, "the histogram of the time to first token is absurd", inputs)
    if window is None or not is_missed:
        return Term(Limit.TTFT, 0, 0, "the TTFT objective is met, or too few requests say", inputs)
    if not _congested(situation):
        return Term(Limit.TTFT, 0, 0, "TTFT is missed with room in the pods: more of them would not help", inputs)
    need = situation.ready_low + _pods_for_tail(policy, share / allowed, total / window.span_s, situation.ready_low)
    sentence = (
        f"{100 * (1 - share):.1f} % of {total:.0f} requests met the TTFT of {policy.objective_s:g} s: {need} needed"
    )
    return Term(Limit.TTFT, need, need, sentence, inputs)


def missed(window: LatencyWindow, objective_s: float) -> float:
    """Count the requests that took longer than `objective_s`.

    Within the objective's bucket the tail is taken for exponential, as that of a wait is: in proportion, a third of all
    requests between 1 and 2.5 s would count as later than 2 s, where most of them took little more than a second. If
    none is later than the bucket, half a request counts as there: the tail goes on.
    """
    beyond_low = sum(window.counts)  # later than the bucket's lower bound
    for low, high, count in zip((0.0, *window.bounds_s), (*window.bounds_s, math.inf), window.counts, strict=True):
        if low >= objective_s or math.isinf(high):
            return beyond_low
        beyond_high = max(0.0, beyond_low - count)
        if high > objective_s:
            part = (objective_s - low) / (high - low)
            return min(beyond_low, math.pow(beyond_low, 1 - part) * math.pow(max(beyond_high, _HALF), part))
        beyond_low = beyond_high
    return beyond_low


def _congested(situation: Situation) -> bool:
    queue, samples = situation.valid.queue, situation.valid.samples
    waits = queue is not None and queue.depth > 0 and queue.age_s > situation.policy.backlog.saturated_age_s
    known = [samples[pod.name] for pod in situation.supply.ready if pod.name in samples]
    full = bool(known) and sum(s.kv_utilization for s in known) / len(known) >= situation.policy.kv_utilization.low
    return waits or full or any(sample.waiting > 0 for sample in known)


def _pods_for_tail(policy: TtftPolicy, excess: float, requests_per_s: float, ready: int) -> int:
    """Pods in addition to `ready` that thin the tail by the factor `excess`.

    Waits have a tail of exp(-spare rate * t), so this takes ln(excess) / t more requests per second.
    """
    each = requests_per_s / max(1, ready)
    most = max(1, pods_for(policy.step_max * ready))
    if policy.step_max == 0:
        return 0
    return min(most, max(1, pods_for(math.log(excess) / policy.objective_s / each)))


TERMS: tuple[Callable[[Situation], Term], ...] = (
    kv_utilization_term,
    backlog_term,
    age_term,
    ttft_term,
    work_term,
)
