"""Term (c): the objective for the time to first token, as gateways measured it."""

from __future__ import annotations

import math

from pagestream_scaling.decision import Limit
from pagestream_scaling.observation import LatencyWindow
from pagestream_scaling.policy import TtftPolicy
from pagestream_scaling.terms.term import Situation, Term, pods_for

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
