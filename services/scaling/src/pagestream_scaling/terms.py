"""The law's terms: each says how many pods are needed, and how many can't be given up. Derived in docs/autoscaling.md.

`need` is what is certainly needed by what is known; `floor` is what may be needed, with the worst in place of what is
missing. Both count pods that serve; 0 <= need <= floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from pagestream_scaling.decision import Limit
from pagestream_scaling.observation import LatencyWindow
from pagestream_scaling.policy import ScalingPolicy, TtftPolicy
from pagestream_scaling.samples import Believed
from pagestream_scaling.supply import Supply
from pagestream_scaling.workload import Workload

_ROUNDING = 1e-9  # 0.8 * 3 / 0.8 is a little more than 3
_MOST = 1_000_000  # pods; keeps a need finite
_HALF = 0.5  # requests; keeps a tail from ending at a bucket's bound


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a term may look at."""

    policy: ScalingPolicy
    replicas: int
    believed: Believed
    supply: Supply
    workload: Workload
    ready_low: int  # fewest ready pods of the TTFT window
    ready_for_s: float  # since when as many pods are ready as now
    kv_sum: float  # KV utilization added over the pods, smoothed


@dataclass(frozen=True, slots=True)
class Term:
    """What one term asks for."""

    limit: Limit
    need: int
    floor: int
    sentence: str
    inputs: dict[str, float] = field(default_factory=dict)


def pods_for(amount: float) -> int:
    """The whole pods that hold `amount` of pods."""
    return min(_MOST, max(0, math.ceil(min(amount, float(_MOST)) - _ROUNDING)))


def kv_term(now: Situation) -> Term:
    """(a) KV utilization against its target; down only below `low`, to what would stay under the target."""
    policy, ready = now.policy.kv_utilization, now.supply.ready
    known = [now.believed.samples[pod.name].kv_utilization for pod in ready if pod.name in now.believed.samples]
    total = sum(known)
    silent = len(ready) - len(known) + now.supply.lost  # they count as full where fewer pods are asked about
    counted = max(1, len(known) + silent)
    need = pods_for(now.kv_sum / policy.target)
    is_low = (now.kv_sum + silent) / counted < policy.low and (total + silent) / counted <= policy.target
    floor = pods_for((now.kv_sum + silent) / policy.target) if is_low else now.replicas
    mean = total / len(known) if known else 0.0
    sentence = (
        f"KV utilization was {now.kv_sum / max(1, len(ready)):.2f} of late, {mean:.2f} now, over {len(known)} of "
        f"{len(ready)} ready pods, target {policy.target:.2f}: {need} needed"
    )
    inputs = {"kv_utilization": mean, "kv_utilization_sum": now.kv_sum}
    return Term(Limit.KV_UTILIZATION, need, max(need, floor), sentence, inputs)


def backlog_term(now: Situation) -> Term:
    """(b) What arrives, and what will be left of the backlog when a pod ordered now is ready, by a pod's capacity."""
    policy, work, queue = now.policy.backlog, now.workload, now.believed.queue
    tokens = queue.tokens if queue is not None else 0.0
    left = _left_at_horizon(tokens, now.supply, work)
    need = pods_for((work.held_for + left / _drain_s(now)) / work.capacity)
    wait_s = tokens / (work.capacity * len(now.supply.ready)) if now.supply.ready else 0.0
    keeps_up = queue is not None and (tokens <= 0 or (wait_s <= policy.oldest_age_s and len(now.supply.ready) > 0))
    floor = need if keeps_up else now.replicas
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
        "startup_s": now.supply.startup_s,
    }
    return Term(Limit.BACKLOG, need, max(need, floor), sentence, inputs)


def _drain_s(now: Situation) -> float:
    """How long a backlog may take once the pods for it are ready."""
    policy = now.policy.backlog
    return max(policy.drain_s, policy.drain_startups * now.supply.startup_s)


def _left_at_horizon(tokens: float, supply: Supply, work: Workload) -> float:
    """The backlog when a pod ordered now will be ready; pods on their way work from when they are."""
    pod_seconds = len(supply.ready) * supply.startup_s + sum(supply.startup_s - s for s in supply.arriving_s)
    return max(0.0, tokens + work.arrivals * supply.startup_s - pod_seconds * work.capacity)


def age_term(now: Situation) -> Term:
    """(b) The oldest entry's age, which needs no belief about capacity.

    Asks once, waits until what it asked for is ready, and then for as long as a backlog may take to be drained.
    """
    policy, queue, ready = now.policy.backlog, now.believed.queue, len(now.supply.ready)
    age_s = queue.age_s if queue is not None and queue.depth > 0 else 0.0
    late = age_s > policy.oldest_age_s
    factor = min(policy.age_factor_max, age_s / policy.oldest_age_s)
    waits = bool(now.supply.arriving_s) or (ready > 0 and now.ready_for_s < _drain_s(now))
    need = 0 if not late else now.supply.expected if waits else max(1, pods_for(ready * factor))
    sentence = f"the oldest request has waited {age_s:.1f} s, at most {policy.oldest_age_s:g} s wanted: {need} needed"
    return Term(Limit.AGE, need, max(need, now.replicas) if late else 0, sentence, {"queue_age_s": age_s})


def ttft_term(now: Situation) -> Term:
    """(c) Measured attainment of the objective; asks only where waiting, and not the model alone, can be the cause."""
    policy, window = now.policy.ttft, now.believed.ttft
    total, misses = (0.0, 0.0) if window is None else (sum(window.counts), missed(window, policy.objective_s))
    inputs = {"ttft_requests": total, "ttft_missed": misses}
    share = misses / total if total > 0 else 0.0
    allowed = 1 - policy.attainment
    told = total >= policy.min_requests and misses >= policy.min_misses and share > allowed
    if now.believed.ttft_absurd:
        return Term(Limit.TTFT, 0, now.replicas, "the histogram of the time to first token is absurd", inputs)
    if window is None or not told:
        return Term(Limit.TTFT, 0, 0, "the TTFT objective is met, or too few requests tell", inputs)
    if not _congested(now):
        return Term(Limit.TTFT, 0, 0, "TTFT is missed with room in the pods: more of them would not help", inputs)
    need = now.ready_low + _pods_for_tail(policy, share / allowed, total / window.span_s, now.ready_low)
    sentence = (
        f"{100 * (1 - share):.1f} % of {total:.0f} requests met the TTFT of {policy.objective_s:g} s: {need} needed"
    )
    return Term(Limit.TTFT, need, need, sentence, inputs)


def missed(window: LatencyWindow, objective_s: float) -> float:
    """How many were later than `objective_s`.

    Within the objective's bucket the tail is taken for exponential, as that of a wait is: a straight line would count
    a third of all that came between 1 and 2.5 s as later than 2 s, where most of them had only just missed the first
    second. Where nobody came later than the bucket, half a request counts as there: the tail goes on.
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


def _congested(now: Situation) -> bool:
    queue, samples = now.believed.queue, now.believed.samples
    waits = queue is not None and queue.depth > 0 and queue.age_s > now.policy.backlog.saturated_age_s
    known = [samples[pod.name] for pod in now.supply.ready if pod.name in samples]
    full = bool(known) and sum(s.kv_utilization for s in known) / len(known) >= now.policy.kv_utilization.low
    return waits or full or any(sample.waiting > 0 for sample in known)


def _pods_for_tail(policy: TtftPolicy, excess: float, requests_per_s: float, ready: int) -> int:
    """Waits have a tail of exp(-spare rate * t): to thin it by `excess` takes ln(excess) / t more requests/s."""
    each = requests_per_s / max(1, ready)
    most = max(1, pods_for(policy.step_max * ready))
    if policy.step_max == 0:
        return 0
    return min(most, max(1, pods_for(math.log(excess) / policy.objective_s / each)))


def work_term(now: Situation) -> Term:
    """One pod at least where there is work: at once from zero, and never to zero before it is done."""
    queue = now.believed.queue
    queued = queue is not None and (queue.depth > 0 or queue.tokens > 0)
    running = (queue is not None and queue.running > 0) or any(
        sample.running + sample.waiting > 0 for sample in now.believed.samples.values()
    )
    need = 1 if queued or running else 0
    depth = queue.depth if queue is not None else 0.0
    owned = queue.running if queue is not None else 0.0
    sentence = f"{depth:.0f} requests wait and {owned:.0f} run: {need} needed"
    return Term(Limit.WORK, need, need, sentence, {"queue_depth": depth, "queue_running": owned})


TERMS: tuple[Callable[[Situation], Term], ...] = (kv_term, backlog_term, age_term, ttft_term, work_term)
