"""Term (b): the queue. Work that arrives and waits, the age of the oldest request, and whether there is any work."""

from __future__ import annotations

from pagestream_scaling.classes import weighted_age, weighted_part
from pagestream_scaling.decision import Limit
from pagestream_scaling.supply import Supply
from pagestream_scaling.terms.term import Situation, Term, pods_for
from pagestream_scaling.workload import Workload, divisible_tokens, output_factor


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
