from typing import Any

import pytest
from pagestream_operator.api import Condition, ConditionType
from pagestream_operator.kube.pods import Pod, unix_seconds
from pagestream_operator.pool.conditions import Finding, Trouble, findings, stamped
from pagestream_operator.pool.status import api_time
from pagestream_operator.pool.view import PoolView
from pagestream_scaling import Decision, Limit
from support.kubernetes.pool_objects import CREATED, deployment_body, pod_body, pool, stored

NOW = unix_seconds(CREATED) + 3600
STEADY = Decision(desired=2, reason="enough", limiting=Limit.NONE, inputs={})
BLIND = Decision(desired=2, reason="enough", limiting=Limit.MISSING, inputs={}, missing=("no sample yet for a",))


def view(replicas: int | None, *pods: dict[str, Any], **more: Any) -> PoolView:
    deployment = None if replicas is None else deployment_body(replicas, **more)
    return PoolView(deployment, [Pod.from_object(body) for body in pods])


def found(
    seen: PoolView, desired: int, *, decision: Decision | None = STEADY, trouble: Trouble | None = None, **spec: Any
) -> dict[ConditionType, Finding]:
    return {each.type: each for each in findings(pool(**spec), seen, desired, decision, trouble, now_s=NOW)}


def scheduled(name: str, since_s: float) -> dict[str, Any]:
    """A starting pod that has had a node for so long."""
    body = pod_body(name, ready=False)
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": api_time(NOW - since_s)}
    body["status"]["conditions"].append(condition)
    return body


def waiting(name: str) -> dict[str, Any]:
    """A pod that no node takes."""
    body = pod_body(name, ready=False)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no nvidia.com/gpu"}
    body["status"]["conditions"].append(condition)
    return body


A, B, STARTING, ENDING = pod_body("a"), pod_body("b"), pod_body("s", ready=False), pod_body("e", ending=True)


@pytest.mark.parametrize(
    ("seen", "desired", "holds", "reason"),
    [
        (view(None), 1, False, "NotCreated"),
        (view(0), 0, True, "ScaledToZero"),
        (view(2, A, B), 2, True, "EnoughEngines"),
        (view(2, A, STARTING), 2, False, "NotEnoughEngines"),
        (view(1, STARTING), 1, False, "NoEngine"),
        (view(2, A, ENDING), 2, False, "NotEnoughEngines"),
    ],
)
def test_ready(seen: PoolView, desired: int, holds: bool, reason: str) -> None:
    condition = found(seen, desired)[ConditionType.READY]
    assert (condition.holds, condition.reason) == (holds, reason)


@pytest.mark.parametrize(
    ("seen", "desired", "reason"),
    [
        (view(None), 1, "Creating"),
        (view(2, A, B, updated=1), 2, "RollingOut"),
        (view(2, A, B, observedGeneration=0), 2, "RollingOut"),
        (view(2, A, STARTING), 2, "ScalingOut"),
        (view(2, A, waiting("w"), updated=1), 2, "Unschedulable"),
        (view(1, A, B), 1, "ScalingIn"),
        (view(1, A, ENDING), 1, "Draining"),
        (view(2, A, B), 2, "Settled"),
        (view(0), 0, "Settled"),
    ],
)
def test_progressing(seen: PoolView, desired: int, reason: str) -> None:
    condition = found(seen, desired)[ConditionType.PROGRESSING]
    assert (condition.reason, condition.holds) == (reason, reason != "Settled")


def test_a_pool_that_grows_or_waits_for_nodes_is_not_degraded() -> None:
    """Its Deployment is past its deadline though every pod has just begun, or has no node to begin on."""
    stuck = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "too long"}
    for pods in ((A, scheduled("new", 30)), (A, waiting("w")), (waiting("w"),)):
        condition = found(view(2, *pods, conditions=[stuck]), 2)[ConditionType.DEGRADED]
        assert (condition.holds, condition.reason) == (False, "AsExpected")
    progressing = found(view(3, A, waiting("w"), waiting("v")), 3)[ConditionType.PROGRESSING]
    assert progressing.message == "2 engines of 3 wait for a node: no nvidia.com/gpu"


def test_degraded_says_what_needs_a_person() -> None:
    stuck = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "too long"}
    quota = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}
    broken = pod_body("x", ready=False)
    broken["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ErrImagePull", "message": "m"}}}]
    cases = [
        (found(view(1, A), 1), False, "AsExpected", "nothing"),
        (found(view(1, scheduled("a", 600), conditions=[stuck]), 1), True, "NoProgress", "too long"),
        (found(view(1, A, conditions=[quota]), 1), True, "NoProgress", "exceeded quota"),
        (found(view(1, broken), 1), True, "PodTrouble", "pod x: ErrImagePull: m"),
        (found(view(1, A), 1, trouble=Trouble("Blocked", "by b")), True, "Blocked", "by b"),
    ]
    for each, holds, reason, message in cases:
        condition = each[ConditionType.DEGRADED]
        assert (condition.holds, condition.reason) == (holds, reason)
        assert message in condition.message


@pytest.mark.parametrize(
    ("decision", "spec", "holds", "reason"),
    [
        (STEADY, {}, True, "FollowsLoad"),
        (BLIND, {}, True, "SamplesMissing"),
        (None, {}, False, "NoDecision"),
        (STEADY, {"replicas": 2}, False, "Pinned"),
        (STEADY, {"paused": True}, False, "Paused"),
    ],
)
def test_scaling_active(decision: Decision | None, spec: dict[str, Any], holds: bool, reason: str) -> None:
    condition = found(view(2, A, B), 2, decision=decision, **spec)[ConditionType.SCALING_ACTIVE]
    assert (condition.holds, condition.reason) == (holds, reason)


def test_a_deleted_pool_says_so() -> None:
    from pagestream_operator.api import EnginePool
    from support.kubernetes.pool_objects import pool_body

    dying = EnginePool.from_object(stored(pool_body(), deletionTimestamp=CREATED))
    each = {finding.type: finding for finding in findings(dying, view(0, ENDING), 0, None, None, now_s=NOW)}
    assert each[ConditionType.PROGRESSING].reason == "Deleting"
    assert "1 engine left to drain" in each[ConditionType.PROGRESSING].message
    assert each[ConditionType.SCALING_ACTIVE].reason == "Deleting"


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    before = [Condition(type="Ready", status="True", reason="EnoughEngines", message="m", last_transition_time="then")]
    same = stamped([Finding(ConditionType.READY, True, "ScaledToZero", "n")], before, 4, "now")[0]
    other = stamped([Finding(ConditionType.READY, False, "NoEngine", "n")], before, 4, "now")[0]
    assert (same.last_transition_time, same.reason, same.observed_generation) == ("then", "ScaledToZero", 4)
    assert (other.last_transition_time, other.status) == ("now", "False")
