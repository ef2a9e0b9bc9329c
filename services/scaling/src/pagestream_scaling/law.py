"""The scaling law: a pure function of what is observed and remembered. docs/autoscaling.md derives it."""

from __future__ import annotations

import math
from dataclasses import replace

from pagestream_scaling.damping import LimitedRecommendation, Recommendation, limit_recommendation, remember
from pagestream_scaling.decision import Decision, Limit
from pagestream_scaling.memory import ScalingMemory, with_lowest
from pagestream_scaling.observation import PoolObservation, ValidSamples, valid_samples
from pagestream_scaling.policy import ScalingPolicy
from pagestream_scaling.supply import Supply, supply, with_startups
from pagestream_scaling.terms import TERMS, Situation, Term, mean_kv_sum, missed, pods_for, with_kv_sum
from pagestream_scaling.workload import with_arrivals, with_capacity, workload

_BACKWARDS_S = 0.001
"""Clocks are read in several places: a difference of so many seconds isn't time that runs backwards."""


def decide(
    policy: ScalingPolicy, observation: PoolObservation, memory: ScalingMemory
) -> tuple[Decision, ScalingMemory]:
    """Compute how many replicas a pool should have.

    Pure: no clock, no I/O, no state. Call it about once a second.

    Args:
        observation: what is seen now.
        memory: what the last call returned; ScalingMemory() for the first one.

    Returns:
        The decision, which lies within the policy's bounds whatever is observed, and the memory for the next call.
    """
    trouble = _clock_trouble(observation, memory)
    if trouble is not None:
        return _hold(policy, observation, trouble), _without_times(memory, observation.time_s)
    valid = valid_samples(observation, policy.samples)
    before = with_startups(memory, observation)
    supplied = supply(observation, valid, before, policy.startup)
    after = with_arrivals(before, valid, supplied, policy.backlog)
    if before.ready != len(supplied.ready):
        after = replace(after, ready=len(supplied.ready), ready_since_s=observation.time_s)
    if before.work_mean is None:  # nothing is known yet: this sample is better than the prior
        after = with_capacity(after, before, valid, supplied, policy.backlog)
    ready_low = with_lowest(before.ready_low, observation.time_s, len(supplied.ready), policy.ttft.window_s)
    after = with_kv_sum(after, observation.time_s, valid, supplied, policy)
    situation = Situation(
        policy=policy,
        replicas=observation.replicas,
        valid=valid,
        supply=supplied,
        workload=workload(after, supplied, policy.backlog, valid.share),
        ready_low=ready_low[0][1],
        ready_for_s=observation.time_s - (after.ready_since_s or 0.0) if memory.ready is not None else math.inf,
        kv_sum=mean_kv_sum(after),
        counted_part=1.0 if after.drained_part is None else after.drained_part,
    )
    terms = [term(situation) for term in TERMS]
    recommendation = _recommendation(situation, observation.time_s, terms)
    if before.work_mean is not None:  # for the next decision: a heavier sample must not look like a faster pod
        after = with_capacity(after, before, valid, supplied, policy.backlog)
    after = replace(after, ready_low=ready_low, rise=situation.workload.rise)
    after = remember(recommendation, after, policy)
    limited = limit_recommendation(recommendation, after, policy)
    return _decision(situation, terms, recommendation, limited), after


def _clock_trouble(observation: PoolObservation, memory: ScalingMemory) -> str | None:
    if not math.isfinite(observation.time_s):
        return "the observation has no time"
    if memory.time_s is not None and observation.time_s < memory.time_s - _BACKWARDS_S:
        return f"the clock went back by {memory.time_s - observation.time_s:.1f} s"
    return None


def _without_times(memory: ScalingMemory, now_s: float) -> ScalingMemory:
    """What a memory holds that is true at any time: how pods start, and what they can do."""
    if not math.isfinite(now_s):
        return memory  # nothing was seen
    capacity_s = None if memory.capacity_s is None else min(memory.capacity_s, now_s)
    return ScalingMemory(
        startups=memory.startups,
        capacity=memory.capacity,
        capacity_s=capacity_s,
        believed=memory.believed,
        inherited=memory.inherited,
        work_high=memory.work_high,
    )


def _hold(policy: ScalingPolicy, observation: PoolObservation, trouble: str) -> Decision:
    """Keep the replicas, within the bounds, at a moment that can't be placed in time."""
    desired = min(policy.max_replicas, max(policy.min_replicas, observation.replicas))
    return Decision(desired, f"{trouble}: nothing is changed", Limit.MISSING, {}, (trouble,))


def _recommendation(situation: Situation, time_s: float, terms: list[Term]) -> Recommendation:
    has_work = any(term.need > 0 for term in terms if term.limit is Limit.WORK)
    is_idle = not has_work and _all_known(situation.valid, situation.supply)
    need, floor = max(term.need for term in terms), max(term.floor for term in terms)
    if situation.replicas == 0 and not has_work:
        need = floor = 0  # what arrived before the pool went to zero brings no pod back
    if need > situation.supply.expected:
        need += min(situation.supply.overdue, situation.policy.startup.replaced_max)
    proven = _proven(situation)
    is_light = _is_light(situation)
    return Recommendation(time_s, situation.replicas, need, max(need, floor), has_work, is_idle, proven, is_light)


def _is_light(situation: Situation) -> bool:
    """Whether first tokens come far within the objective. Where that is unknown, or of few requests, it isn't."""
    policy, window = situation.policy, situation.valid.ttft
    if window is None or sum(window.counts) < policy.ttft.min_requests:
        return False
    late = missed(window, policy.ttft.objective_s * policy.rate.light_ttft)
    return late <= (1 - policy.ttft.attainment) * sum(window.counts)


def _proven(situation: Situation) -> int | None:
    work = situation.workload
    if work.measured:
        return None
    if work.arrivals <= 0:
        return 0
    return pods_for(work.arrivals / work.proven) if work.proven else situation.replicas


def _all_known(valid: ValidSamples, pods: Supply) -> bool:
    return valid.queue is not None and all(pod.name in valid.samples for pod in pods.ready)


def _decision(
    situation: Situation, terms: list[Term], recommendation: Recommendation, limited: LimitedRecommendation
) -> Decision:
    limiting, sentence = _why(situation, terms, recommendation, limited)
    inputs = {name: value for term in terms for name, value in term.inputs.items()}
    inputs |= {
        "replicas": situation.replicas,
        "ready": len(situation.supply.ready),
        "starting": len(situation.supply.arriving_s),
        "overdue": situation.supply.overdue,
        "share": situation.valid.share,
        "need": recommendation.need,
        "floor": recommendation.floor,
    }
    missing = situation.valid.missing
    reason = f"{sentence}; missing: {', '.join(missing)}" if missing else sentence
    return Decision(limited.desired, reason, limiting, inputs, missing, limited.panicking)


def _why(
    situation: Situation, terms: list[Term], recommendation: Recommendation, limited: LimitedRecommendation
) -> tuple[Limit, str]:
    """The last limit that changed the number, else the term that asked for it; and a sentence with both."""
    need, floor, replicas = recommendation.need, recommendation.floor, recommendation.replicas
    asking = max(terms, key=lambda term: term.need if need >= replicas else term.floor)
    limiting, sentence = asking.limit, asking.sentence
    if need < replicas <= floor:
        sentence += f", fewer than {replicas} might not be enough"
        limiting = Limit.MISSING if situation.valid.missing else limiting
    if asking.need == asking.floor == 0:
        limiting, sentence = Limit.NONE, "there is nothing to do"
    for limit in limited.limits:
        limiting = limit
        sentence += f"; {_SENTENCES[limit].format(desired=limited.desired, policy=situation.policy)}"
    return limiting, sentence


_SENTENCES = {
    Limit.STABILIZATION: "the needs of the stabilisation window ask for {desired}",
    Limit.PANIC: "the pool panicked a moment ago, nothing is given back until what it ordered has come",
    Limit.IDLE: "nothing was queued or running for {policy.idle.after_s:g} s",
    Limit.RATE: "the rate limit allows {desired} now",
    Limit.UNPROVEN: "no pod was seen to do what fewer would have to, so they are removed one step at a time: {desired}",
    Limit.MIN: "at least {desired} must be there",
    Limit.MAX: "at most {desired} may be there",
}
