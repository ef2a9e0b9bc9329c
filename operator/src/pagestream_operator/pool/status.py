"""The status of a pool with its conditions, a pure function of its spec, its view and the last decision, and whether a
new one is worth writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pagestream_scaling import Decision

from pagestream_operator.api import (
    Condition,
    ConditionType,
    EnginePool,
    EnginePoolStatus,
    LearnedStatus,
    ScalingStatus,
)
from pagestream_operator.children.manifest import selector
from pagestream_operator.fields import seconds
from pagestream_operator.pool.publication import awaits_card, published_card
from pagestream_operator.pool.view import PoolView

_DIGITS = 3
"""Decimal places of numbers in a status: a rate that fades must stop changing."""
_CONTESTED_KEPT_S = 600.0
"""Seconds for which the condition of a refused operator is kept. That one writes it again while it is refused."""
_VOLATILE = ("kv_utilization", "scaling", "learned")


def api_time(unix_s: float) -> str:
    """Format a time as the API does."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pool_status(
    pool: EnginePool,
    view: PoolView,
    found: tuple[Finding, ...],
    *,
    desired: int,
    decision: Decision | None,
    kv_utilization: float | None,
    learned: LearnedStatus | None = None,
    term: int,
    now_s: float,
) -> EnginePoolStatus:
    """Compute the status of a pool."""
    now = api_time(now_s)
    labels = selector(pool.name)
    is_contested = any(each.type is ConditionType.CONTESTED for each in found)
    refused = [] if is_contested else _foreign_conditions(pool, now_s)
    return EnginePoolStatus(
        observed_generation=pool.generation,
        conditions=[*stamped(found, pool.status.conditions, pool.generation, now), *refused],
        controller_class=pool.status.controller_class,
        published_card=published_card(pool, view),
        replicas=len(view.active),
        ready_replicas=len(view.ready),
        desired_replicas=desired,
        draining_replicas=len(view.draining),
        updated_replicas=view.updated,
        selector=",".join(f"{name}={value}" for name, value in labels.items()),
        kv_utilization=None if kv_utilization is None else f"{round(100 * kv_utilization)}%",
        scaling=pool.status.scaling if decision is None else _scaling_status(decision, now),
        learned=learned or pool.status.learned,
        adapters=pool.status.adapters,
        adapters_applied=pool.status.adapters_applied,
        leader_term=term,
    )


def _foreign_conditions(pool: EnginePool, now_s: float) -> list[Condition]:
    """What a refused operator has written about this generation of the pool, if that isn't long ago."""
    return [
        condition
        for condition in pool.status.conditions
        if condition.type == ConditionType.CONTESTED
        and condition.reason == REFUSED
        and condition.observed_generation == pool.generation
        and now_s - (seconds(condition.last_transition_time) or 0.0) < _CONTESTED_KEPT_S
    ]


def differs_in_substance(new: EnginePoolStatus, old: EnginePoolStatus) -> bool:
    """Whether more has changed than the numbers behind the decision."""
    return _substance(new) != _substance(old)


def differs(new: EnginePoolStatus, old: EnginePoolStatus) -> bool:
    """Whether anything but the time of the decision, and of the arrivals behind it, has changed."""
    return _timeless(new) != _timeless(old)


def changed(new: EnginePoolStatus, old: EnginePoolStatus) -> list[tuple[Condition, Condition | None]]:
    """Return the conditions whose status or reason has changed, each with its former one."""
    known = {condition.type: condition for condition in old.conditions}
    pairs = [(condition, known.get(condition.type)) for condition in new.conditions]
    return [(now, was) for now, was in pairs if was is None or (was.status, was.reason) != (now.status, now.reason)]


def _scaling_status(decision: Decision, now: str) -> ScalingStatus:
    return ScalingStatus(
        time=now,
        desired=decision.desired,
        limiting=str(decision.limiting),
        reason=decision.reason,
        inputs={name: round(value, _DIGITS) for name, value in sorted(decision.inputs.items())},
        missing=list(decision.missing),
        panicking=decision.panicking,
    )


def _substance(status: EnginePoolStatus) -> tuple[EnginePoolStatus, object]:
    scaling = status.scaling
    decision = None if scaling is None else (scaling.desired, scaling.limiting, scaling.missing, scaling.panicking)
    return status.model_copy(update=dict.fromkeys(_VOLATILE)), decision


def _timeless(status: EnginePoolStatus) -> EnginePoolStatus:
    scaling, learned = status.scaling, status.learned
    update = {
        "scaling": scaling and scaling.model_copy(update={"time": ""}),
        "learned": learned and learned.model_copy(update={"rise_time": None}),
    }
    return status.model_copy(update=update)


_MESSAGE_CHARACTERS = 4096
REFUSED = "ServedByAnother"
"""Reason of the condition that a refused operator writes."""


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
