"""The scaling law: a pure function from what is seen and remembered to a number of pods; see docs/autoscaling.md."""

from __future__ import annotations

import math
from dataclasses import replace

from pagestream_scaling.decision import Decision, Limit
from pagestream_scaling.memory import ScalingMemory
from pagestream_scaling.observation import PoolObservation
from pagestream_scaling.policy import ScalingPolicy
from pagestream_scaling.restraint import Restrained, Wish, remembered, restrained
from pagestream_scaling.samples import Believed, believed
from pagestream_scaling.supply import Supply, supply, with_startups
from pagestream_scaling.terms import TERMS, Situation, Term
from pagestream_scaling.utilization import mean_kv_sum, with_kv_sum
from pagestream_scaling.windows import with_lowest
from pagestream_scaling.workload import with_arrivals, with_capacity, workload

_BACKWARDS_S = 0.001  # clocks are read in several places; so much isn't time running backwards


def decide(
    policy: ScalingPolicy, observation: PoolObservation, memory: ScalingMemory
) -> tuple[Decision, ScalingMemory]:
    """How many replicas the pool should have, and what to remember until the next call.

    Pure: no clock, no I/O, no state. Call it about once a second with the memory of the last call; ScalingMemory()
    where there is none. Whatever is observed, the answer lies within the policy's bounds.
    """
    trouble = _clock_trouble(observation, memory)
    if trouble is not None:
        return _held(policy, observation, trouble), ScalingMemory(startups=memory.startups)
    seen = believed(observation, policy.samples)
    before = with_startups(memory, observation)
    pods = supply(observation, seen, before, policy.startup)
    after = with_arrivals(before, seen, pods, policy.backlog)
    if before.ready != len(pods.ready):
        after = replace(after, ready=len(pods.ready), ready_since_s=observation.time_s)
    if before.work_mean is None:  # nothing is known yet: what this sample shows is better than a belief
        after = with_capacity(after, before, seen, pods, policy.backlog)
    ready_low = with_lowest(before.ready_low, observation.time_s, len(pods.ready), policy.ttft.window_s)
    after = with_kv_sum(after, observation.time_s, seen, pods, policy)
    situation = Situation(
        policy=policy,
        replicas=observation.replicas,
        believed=seen,
        supply=pods,
        workload=workload(after, pods, policy.backlog),
        ready_low=ready_low[0][1],
        ready_for_s=observation.time_s - (after.ready_since_s or 0.0) if memory.ready is not None else math.inf,
        kv_sum=mean_kv_sum(after),
    )
    terms = [term(situation) for term in TERMS]
    wish = _wish(situation, observation.time_s, terms)
    if before.work_mean is not None:  # learnt afterwards, so that a heavier sample never looks like a faster pod
        after = with_capacity(after, before, seen, pods, policy.backlog)
    after = remembered(wish, replace(after, ready_low=ready_low), policy)
    done = restrained(wish, after, policy)
    return _decision(situation, terms, wish, done), after


def _clock_trouble(observation: PoolObservation, memory: ScalingMemory) -> str | None:
    if not math.isfinite(observation.time_s):
        return "the observation has no time"
    if memory.time_s is not None and observation.time_s < memory.time_s - _BACKWARDS_S:
        return f"the clock went back by {memory.time_s - observation.time_s:.1f} s"
    return None


def _held(policy: ScalingPolicy, observation: PoolObservation, trouble: str) -> Decision:
    """Nothing is done at a moment that can't be placed in time, but the bounds are the user's word."""
    desired = min(policy.max_replicas, max(policy.min_replicas, observation.replicas))
    return Decision(desired, f"{trouble}: nothing is changed", Limit.MISSING, {}, (trouble,))


def _wish(now: Situation, time_s: float, terms: list[Term]) -> Wish:
    work = any(term.need > 0 for term in terms if term.limit is Limit.WORK)
    idle = not work and _all_known(now.believed, now.supply)
    need, floor = max(term.need for term in terms), max(term.floor for term in terms)
    if now.replicas == 0 and not work:
        need = floor = 0  # what arrived before the pool went to zero wakes nobody
    if need > now.supply.expected:
        need += min(now.supply.overdue, now.policy.startup.replaced_max)
    return Wish(time_s, now.replicas, need, max(need, floor), work, idle)


def _all_known(seen: Believed, pods: Supply) -> bool:
    return seen.queue is not None and all(pod.name in seen.samples for pod in pods.ready)


def _decision(now: Situation, terms: list[Term], wish: Wish, done: Restrained) -> Decision:
    limiting, sentence = _why(now, terms, wish, done)
    inputs = {name: value for term in terms for name, value in term.inputs.items()}
    inputs |= {
        "replicas": now.replicas,
        "ready": len(now.supply.ready),
        "starting": len(now.supply.arriving_s),
        "overdue": now.supply.overdue,
        "need": wish.need,
        "floor": wish.floor,
    }
    missing = now.believed.missing
    reason = f"{sentence}; missing: {', '.join(missing)}" if missing else sentence
    return Decision(done.desired, reason, limiting, inputs, missing, done.panicking)


def _why(now: Situation, terms: list[Term], wish: Wish, done: Restrained) -> tuple[Limit, str]:
    """The last restraint that changed the number, else the term that asked for it; and a sentence with both."""
    rises = wish.need > wish.replicas
    asking = max(terms, key=lambda term: term.need if rises or wish.need == wish.replicas else term.floor)
    limit, sentence = asking.limit, asking.sentence
    if not rises and wish.need < wish.replicas and wish.floor >= wish.replicas:
        sentence += f", fewer than {wish.replicas} might not be enough"
        limit = Limit.MISSING if now.believed.missing else limit
    if asking.need == asking.floor == 0:
        limit, sentence = Limit.NONE, "there is nothing to do"
    for restraint in done.limits:
        limit, sentence = restraint, f"{sentence}; {_RESTRAINTS[restraint].format(done=done, policy=now.policy)}"
    return limit, sentence


_RESTRAINTS = {
    Limit.STABILIZATION: "the needs of the stabilisation window ask for {done.desired}",
    Limit.PANIC: "the pool panicked a moment ago, nothing is given back until what it ordered has come",
    Limit.IDLE: "nothing was queued or running for {policy.idle.after_s:g} s",
    Limit.RATE: "the rate limit allows {done.desired} now",
    Limit.MIN: "at least {done.desired} must be there",
    Limit.MAX: "at most {done.desired} may be there",
}
