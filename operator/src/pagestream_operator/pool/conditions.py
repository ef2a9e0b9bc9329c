"""The conditions of a pool: a pure function of its spec, its view and the last decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pagestream_scaling import Decision

from pagestream_operator.api import Condition, ConditionType, EnginePool
from pagestream_operator.fields import seconds
from pagestream_operator.pool.publication import awaits_card
from pagestream_operator.pool.view import PoolView

_MESSAGE_CHARACTERS = 4096


@dataclass(frozen=True)
class Trouble:
    """Something that needs an administrator."""

    reason: str
    message: str


@dataclass(frozen=True)
class Finding:
    """A condition without its times."""

    type: ConditionType
    holds: bool
    reason: str
    message: str


def findings(
    pool: EnginePool,
    view: PoolView,
    desired: int,
    decision: Decision | None,
    trouble: Trouble | None,
    *,
    now_s: float,
) -> tuple[Finding, ...]:
    """Compute all four conditions. `trouble` is what stopped the operator's own pass, if anything."""
    return (
        _ready(view, desired),
        _progressing(pool, view, desired),
        _degraded(pool, view, trouble, now_s),
        _scaling(pool, decision, trouble),
    )


def stamped(found: Sequence[Finding], before: Sequence[Condition], generation: int, now: str) -> list[Condition]:
    """Add times: a condition keeps its time until its status changes."""
    known = {condition.type: condition for condition in before}
    return [_stamped(finding, known.get(finding.type), generation, now) for finding in found]


def _stamped(finding: Finding, before: Condition | None, generation: int, now: str) -> Condition:
    status: Literal["True", "False"] = "True" if finding.holds else "False"
    is_kept = before is not None and before.status == status and seconds(before.last_transition_time) is not None
    since = before.last_transition_time if before is not None and is_kept else now
    return Condition(
        type=finding.type.value,
        status=status,
        reason=finding.reason,
        message=finding.message,
        last_transition_time=since,
        observed_generation=generation,
    )


def _ready(view: PoolView, desired: int) -> Finding:
    ready = len(view.ready)
    if view.deployment is None:
        return Finding(ConditionType.READY, False, "NotCreated", "the pool's Deployment isn't there yet")
    if desired == 0:
        return Finding(ConditionType.READY, True, "ScaledToZero", "no engine is wanted; a request brings one")
    if ready >= desired:
        return Finding(ConditionType.READY, True, "EnoughEngines", f"{_engines(ready)} ready, {desired} wanted")
    reason = "NotEnoughEngines" if ready else "NoEngine"
    return Finding(ConditionType.READY, False, reason, f"{_engines(ready)} ready, {desired} wanted")


def _progressing(pool: EnginePool, view: PoolView, desired: int) -> Finding:
    draining, active = len(view.draining), len(view.active)
    cases = (
        (
            pool.is_deleted,
            "Deleting",
            f"the pool is being deleted; {_engines(draining + active)} left to drain"
            if draining + active
            else "the pool is being deleted; its model is being unpublished",
        ),
        (view.deployment is None, "Creating", "the pool's objects are being created"),
        (
            bool(view.waiting),
            "Unschedulable",
            f"{_engines(len(view.waiting))} of {desired} {'waits' if len(view.waiting) == 1 else 'wait'} for a node: "
            f"{view.waiting[0].waiting_reason if view.waiting else ''}",
        ),
        (
            not view.is_observed or view.updated < view.spec_replicas,
            "RollingOut",
            f"{view.updated} of {view.spec_replicas} engines are of the newest template",
        ),
        (
            len(view.ready) < desired,
            "ScalingOut",
            f"{desired - len(view.ready)} of {desired} engines are starting",
        ),
        (active > desired, "ScalingIn", f"{_engines(active)}, {desired} wanted"),
        (draining > 0, "Draining", f"{_engines(draining)} draining"),
    )
    for holds, reason, message in cases:
        if holds:
            return Finding(ConditionType.PROGRESSING, True, reason, message)
    return Finding(ConditionType.PROGRESSING, False, "Settled", "nothing is changing")


def _degraded(pool: EnginePool, view: PoolView, trouble: Trouble | None, now_s: float) -> Finding:
    kind = ConditionType.DEGRADED
    if trouble is not None:
        return Finding(kind, True, trouble.reason, trouble.message)
    stuck = view.stuck(pool.spec.rollout.progress_deadline_seconds, now_s)
    of_pod = view.trouble(now_s)
    if stuck is not None:
        return Finding(kind, True, "NoProgress", stuck if of_pod is None else f"{stuck} {of_pod}")
    if of_pod is not None:
        return Finding(kind, True, "PodTrouble", of_pod)
    if view.oddities:
        return Finding(kind, True, "Unreadable", "; ".join(view.oddities)[:_MESSAGE_CHARACTERS])
    refused = [f"{each.name}: {each.message}" for each in pool.status.adapters if each.message]
    if refused:
        return Finding(kind, True, "AdapterRefused", "; ".join(refused))
    return Finding(kind, False, "AsExpected", "nothing needs an administrator")


def _scaling(pool: EnginePool, decision: Decision | None, trouble: Trouble | None) -> Finding:
    kind = ConditionType.SCALING_ACTIVE
    if pool.is_deleted:
        return Finding(kind, False, "Deleting", "the pool is being deleted")
    if pool.spec.paused:
        return Finding(kind, False, "Paused", "spec.paused is set; unset it to go on")
    if pool.spec.replicas is not None:
        return Finding(
            kind, False, "Pinned", f"spec.replicas pins the pool at {pool.spec.replicas}; set it to null to unpin it"
        )
    if decision is None:
        reason = trouble.reason if trouble is not None else "NoDecision"
        message = trouble.message if trouble is not None else "nothing was decided yet"
        return Finding(kind, False, reason, message)
    return _following(pool, decision)


def _following(pool: EnginePool, decision: Decision) -> Finding:
    reason, message = "FollowsLoad", "the number of engines follows the load"
    if awaits_card(pool):
        reason = "Publishing"
        message = "one engine at least, until one is ready and gateways know the model by it"
    elif decision.missing:
        reason = "SamplesMissing"
        message = f"never fewer engines for now: {'; '.join(decision.missing)}"
    return Finding(ConditionType.SCALING_ACTIVE, True, reason, message)


def _engines(count: int) -> str:
    return "1 engine" if count == 1 else f"{count} engines"
