"""The status of a pool, and whether a new one is worth writing."""

from __future__ import annotations

from datetime import UTC, datetime

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
from pagestream_operator.pool.conditions import Finding, stamped
from pagestream_operator.pool.contest import REFUSED
from pagestream_operator.pool.publication import published_card
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
        scaling=pool.status.scaling if decision is None else _scaling(decision, now),
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


def _scaling(decision: Decision, now: str) -> ScalingStatus:
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
