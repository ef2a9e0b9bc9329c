"""What the operator makes of what it sees of a pool: claims, conditions, status, replicas, which pods end first."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from pagestream_operator.api import Condition, ConditionType, EnginePool, EnginePoolStatus, LearnedStatus
from pagestream_operator.kube import DELETION_COST, Pod
from pagestream_operator.metrics import MetricsStore
from pagestream_operator.pool import (
    Claim,
    Finding,
    PoolView,
    Scaler,
    Shares,
    Trouble,
    api_time,
    changed,
    claim_on,
    deletion_costs,
    differs,
    differs_in_substance,
    findings,
    first_replicas,
    mean_utilization,
    pool_status,
    stamped,
    wanted_replicas,
    without_spares,
)
from pagestream_operator.pool import DeletionCost as Cost
from pagestream_scaling import (
    Decision,
    Limit,
    PodObservation,
    PodSample,
    PodState,
    PoolObservation,
    SamplesPolicy,
    ScalingMemory,
    ScalingPolicy,
    StartupPolicy,
    decide,
)
from support.kubernetes.pool_objects import CREATED, deployment_body, pod_body, pool, pool_body, stored

OURS, OTHER = "home.pagestream", "models.pagestream"


@pytest.mark.parametrize(
    ("named", "holder", "claim"),
    [
        (None, None, Claim.FREE),
        (None, OURS, Claim.OWN),
        (None, OTHER, Claim.REFUSED),
        (OURS, None, Claim.FREE),
        (OURS, OURS, Claim.OWN),
        (OURS, OTHER, Claim.FREE),
        (OTHER, None, Claim.FOREIGN),
        (OTHER, OURS, Claim.FOREIGN),
        (OTHER, OTHER, Claim.FOREIGN),
    ],
)
def test_what_a_pool_is_to_an_operator(named: str | None, holder: str | None, claim: Claim) -> None:
    spec = {} if named is None else {"controllerClass": named}
    status = {} if holder is None else {"controllerClass": holder}
    assert claim_on({"spec": spec, "status": status}, OURS) is claim
    assert claim_on({"spec": spec, "status": status}, OURS).is_served == (claim in (Claim.OWN, Claim.FREE))


NOW = datetime.fromisoformat(CREATED).timestamp()
LATER = NOW + 3600
STEADY = Decision(desired=2, reason="enough", limiting=Limit.NONE, inputs={})
BLIND = Decision(desired=2, reason="enough", limiting=Limit.MISSING, inputs={}, missing=("no sample yet for a",))


def view(replicas: int | None, *pods: dict[str, Any], **more: Any) -> PoolView:
    deployment = None if replicas is None else deployment_body(replicas, **more)
    return PoolView(deployment, [Pod.from_object(body) for body in pods])


def found(
    seen: PoolView, desired: int, *, decision: Decision | None = STEADY, trouble: Trouble | None = None, **spec: Any
) -> dict[ConditionType, Finding]:
    return {each.type: each for each in findings(pool(**spec), seen, desired, decision, trouble, now_s=LATER)}


def scheduled(name: str, since_s: float) -> dict[str, Any]:
    """A starting pod that has had a node for so long."""
    body = pod_body(name, ready=False)
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": api_time(LATER - since_s)}
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


def restarted(name: str, *, seconds_ago: float, count: int = 4, **state: Any) -> dict[str, Any]:
    """A ready pod whose engine has ended."""
    body = pod_body(name)
    end = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": api_time(LATER - seconds_ago)}
    body["status"]["containerStatuses"] = [
        {"name": "engine", "restartCount": count, "state": state or {"running": {}}, "lastState": {"terminated": end}}
    ]
    return body


def failed(name: str, *, seconds_ago: float, reason: str = "Evicted", phase: str = "Failed") -> dict[str, Any]:
    """A pod that kubelet has evicted, or not admitted. One whose containers exit with 0 succeeds without a reason."""
    body = pod_body(name, ready=False)
    started = api_time(LATER - seconds_ago)
    said = {"reason": reason, "message": "low on memory"} if phase == "Failed" else {}
    return {**body, "status": {"phase": phase, "startTime": started, **said}}


def ending(name: str, *, seconds_ago: float) -> dict[str, Any]:
    """A pod whose grace has been over for so long."""
    body = pod_body(name, deletionTimestamp=api_time(LATER - seconds_ago))
    return {**body, "spec": {"nodeName": "lost-1"}}


def test_degraded_names_pods_that_end_again_and_again_or_not_at_all() -> None:
    killed = "pod k: container engine has ended 4 times, last by OOMKilled (exit code 137)"
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    stuck = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "too long."}
    late = pod_body("s", ready=False)
    late["status"]["conditions"].append(scheduled("s", 900)["status"]["conditions"][1])
    late["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ErrImagePull"}}}]
    cases = [
        (view(1, restarted("k", seconds_ago=30)), killed),
        (view(1, restarted("k", seconds_ago=30, count=1)), ""),
        (view(1, restarted("k", seconds_ago=601)), ""),
        (view(1, restarted("k", seconds_ago=601, **back_off)), "pod k: CrashLoopBackOff: back-off 5m0s"),
        (view(1, restarted("k", seconds_ago=9, **back_off)), "pod k: CrashLoopBackOff: back-off 5m0s"),
        (view(1, late, conditions=[stuck]), "too long. pod s: ErrImagePull"),
        (view(1, A, failed("f", seconds_ago=30)), ""),
        (view(1, A, failed("f", seconds_ago=30), failed("g", seconds_ago=700)), ""),
        (view(1, A, failed("f", seconds_ago=30), failed("g", seconds_ago=31)), ""),
        (view(1, A, *(failed(name, seconds_ago=30, reason="NodeShutdown") for name in "fg")), ""),
        (
            view(1, A, failed("f", seconds_ago=30), failed("g", seconds_ago=90, reason="TopologyAffinityError")),
            "2 pods were ended by their nodes within ten minutes, last f: Evicted: low on memory",
        ),
        (
            view(1, A, *(failed(name, seconds_ago=ago, phase="Succeeded") for name, ago in (("f", 30), ("g", 90)))),
            "2 pods were ended by their nodes within ten minutes, last f: ",
        ),
        (view(1, A, ending("e", seconds_ago=-10)), ""),
        (view(1, A, ending("e", seconds_ago=90)), "pod e has to be over since 00:58:30Z, and node lost-1"),
    ]
    for seen, message in cases:
        condition = found(seen, 1)[ConditionType.DEGRADED]
        assert condition.holds == bool(message), condition
        assert condition.message.startswith(message or "nothing needs")


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
    dying = EnginePool.from_object(stored(pool_body(), deletionTimestamp=CREATED))
    each = {finding.type: finding for finding in findings(dying, view(0, ENDING), 0, None, None, now_s=LATER)}
    assert each[ConditionType.PROGRESSING].reason == "Deleting"
    assert "1 engine left to drain" in each[ConditionType.PROGRESSING].message
    assert each[ConditionType.SCALING_ACTIVE].reason == "Deleting"


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    then = "2026-01-01T00:00:00Z"
    before = [Condition(type="Ready", status="True", reason="EnoughEngines", message="m", last_transition_time=then)]
    same = stamped([Finding(ConditionType.READY, True, "ScaledToZero", "n")], before, 4, "now")[0]
    other = stamped([Finding(ConditionType.READY, False, "NoEngine", "n")], before, 4, "now")[0]
    assert (same.last_transition_time, same.reason, same.observed_generation) == (then, "ScaledToZero", 4)
    assert (other.last_transition_time, other.status) == ("now", "False")


DECISION = Decision(desired=2, reason="2 do", limiting=Limit.NONE, inputs={"kv": 0.123456, "arrivals": 1e-9})


def status(decision: Decision | None = DECISION, now_s: float = NOW, **more: Any) -> EnginePoolStatus:
    bodies = [pod_body("a"), pod_body("b", ready=False), pod_body("c", ending=True)]
    view = PoolView(deployment_body(2), [Pod.from_object(body) for body in bodies])
    demo = pool()
    return pool_status(
        demo,
        view,
        findings(demo, view, 2, decision, None, now_s=NOW),
        desired=2,
        decision=decision,
        kv_utilization=0.6,
        term=3,
        now_s=now_s,
        **more,
    )


def test_what_is_told() -> None:
    made = status()
    assert (made.replicas, made.ready_replicas, made.draining_replicas, made.desired_replicas) == (2, 1, 1, 2)
    assert made.kv_utilization == "60%"
    assert made.leader_term == 3
    assert made.scaling is not None
    assert made.scaling.time == "2026-01-01T00:00:00Z"
    assert made.scaling.inputs == {"arrivals": 0.0, "kv": 0.123}


def test_an_object_has_no_empty_fields() -> None:
    assert None not in status(None).to_object().values()


def test_numbers_that_move_are_no_substance() -> None:
    moved = status(replace(DECISION, inputs={"kv": 0.2}, reason="2 still do"))
    assert not differs_in_substance(moved, status())
    assert differs(moved, status())


def test_time_alone_is_no_difference() -> None:
    assert not differs(
        status(now_s=NOW + 60), status().model_copy(update={"conditions": status(now_s=NOW + 60).conditions})
    )


def test_another_limit_or_number_is_substance() -> None:
    assert differs_in_substance(status(replace(DECISION, limiting=Limit.PANIC)), status())
    assert differs_in_substance(status(replace(DECISION, desired=3)), status())
    assert differs_in_substance(status().model_copy(update={"leader_term": 4}), status())


def test_transitions_are_told_once() -> None:
    assert {now.type for now, was in changed(status(), EnginePoolStatus())} == {
        "Ready",
        "Progressing",
        "Degraded",
        "ScalingActive",
    }
    assert changed(status(), status()) == []


def observed(pod: Pod, share: float) -> PodObservation:
    return pod.observed(PodSample(0.0, share, 1, 0), 0.0)


def pods(**costs: str | None) -> list[Pod]:
    bodies = {
        name: pod_body(name, annotations={} if cost is None else {DELETION_COST: cost}) for name, cost in costs.items()
    }
    return [Pod.from_object(body) for body in bodies.values()]


def test_the_cheapest_are_marked_in_order() -> None:
    all_pods = pods(a=None, b=None, c=None)
    seen = [observed(pod, share) for pod, share in zip(all_pods, (0.5, 0.1, 0.3), strict=True)]
    assert {mark.pod: mark.cost for mark in deletion_costs(all_pods, seen, 2)} == {"b": "-1000000", "c": "-999999"}


def test_marks_of_an_earlier_decision_are_taken_away() -> None:
    all_pods = pods(a="-1000000", b=None)
    seen = [observed(all_pods[0], 0.9), observed(all_pods[1], 0.1)]
    assert sorted(deletion_costs(all_pods, seen, 1), key=lambda mark: mark.pod) == [
        Cost("a", None),
        Cost("b", "-1000000"),
    ]


def test_a_right_mark_is_not_written_again() -> None:
    all_pods = pods(a="-1000000", b=None)
    assert deletion_costs(all_pods, [observed(all_pods[0], 0.1), observed(all_pods[1], 0.9)], 1) == []


def test_somebody_elses_cost_stays() -> None:
    all_pods = pods(a="100", b=None)
    assert deletion_costs(all_pods, [observed(all_pods[0], 0.9), observed(all_pods[1], 0.1)], 1) == [
        Cost("b", "-1000000")
    ]


def test_ending_pods_are_neither_marked_nor_counted() -> None:
    ending = Pod.from_object(pod_body("e", ending=True))
    [a] = pods(a=None)
    assert deletion_costs([ending, a], [observed(ending, 0.0), observed(a, 0.9)], 1) == [Cost("a", "-1000000")]


def pod(
    name: str, share: float, *, age_s: float = 1, state: PodState = PodState.READY, drains: bool = False
) -> PodObservation:
    return PodObservation(name, state, 0.0, 1.0, PodSample(NOW - age_s, share, 1, 0, draining=drains))


def mean_of(*pods: PodObservation) -> float | None:
    return mean_utilization(PoolObservation(NOW, len(pods), pods), SamplesPolicy())


def test_the_column_is_the_mean_of_ready_pods() -> None:
    assert mean_of(pod("a", 0.5), pod("b", 0.7)) == 0.6


def test_stale_absurd_and_draining_samples_are_no_part_of_it() -> None:
    others = (
        pod("old", 0.9, age_s=3600),
        pod("absurd", 7.0),
        pod("ending", 0.1, state=PodState.DRAINING),
        pod("draining", 0.1, drains=True),
        pod("starting", 0.1, state=PodState.STARTING),
    )
    assert mean_of(*others) is None
    assert mean_of(pod("a", 0.5), *others) == 0.5


def test_a_pod_without_a_node_is_counted_on_and_not_replaced() -> None:
    body = pod_body("waits", ready=False)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no nvidia.com/gpu"}
    body["status"]["conditions"].append(condition)
    waits = Pod.from_object(body)
    now_s = waits.created_s + 3600
    observation = PoolObservation(now_s, 1, (waits.observed(None, now_s),))
    counted = decide(ScalingPolicy(), observation, ScalingMemory())[0].inputs
    assert (counted["overdue"], counted["starting"]) == (0, 1)


def test_an_engine_that_changes_its_model_is_counted_on() -> None:
    """By the time of its start it would be overdue at once, and another pod be ordered for each change."""
    changes = Pod.from_object(pod_body("changes", ready=False))
    now_s = changes.created_s + 35  # it lost its readiness 15 s ago
    for starts_anew, expected in ((False, 0), (True, 1)):
        seen = PoolObservation(now_s, 1, (changes.observed(None, now_s, starts_anew=starts_anew),))
        policy = ScalingPolicy(startup=StartupPolicy(prior_s=10.0))
        assert decide(policy, seen, ScalingMemory())[0].inputs["starting"] == expected


def test_the_last_change_of_a_model_is_no_start() -> None:
    """What became ready before the operator was there may have changed its model hours after its start."""
    body = pod_body("changed")
    body["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:30:00Z"
    changed = Pod.from_object(body)
    now_s = changed.created_s + 3600
    view = PoolView(deployment_body(1), [changed])
    one = pool(minReplicas=1, maxReplicas=4)
    second = one.spec.model.model_copy(update={"served_name": "second"})
    several = replace(one, spec=one.spec.model_copy(update={"models": [second]}))
    starts = []
    for asked in (one, several):
        scaler = Scaler(MetricsStore(release="default.demo"), Shares())
        starts.append(scaler.decide(asked, ScalingPolicy(), view, now_s).decision.inputs["startup_s"])
    assert starts == [1800.0, StartupPolicy().prior_s]


def test_a_pool_starts_anew_at_its_last_size_within_its_bounds() -> None:
    def size(last: int, **spec: Any) -> int:
        demo = pool(minReplicas=2, maxReplicas=6, **spec)
        return first_replicas(replace(demo, status=EnginePoolStatus(desired_replicas=last)))

    assert [size(0), size(4), size(40), size(4, replicas=3)] == [2, 4, 6, 3]
    assert [size(0, warmSpares=2), size(6, warmSpares=2), size(4, warmSpares=2, replicas=3)] == [4, 6, 3]


def test_the_law_sees_no_spares_among_the_replicas_it_asked_for() -> None:
    demo = pool(minReplicas=0, maxReplicas=6, warmSpares=2)
    assert [without_spares(demo, replicas) for replicas in (1, 2, 5)] == [0, 0, 3]
    assert without_spares(pool(replicas=3, warmSpares=2), 3) == 3


def test_a_decision_about_another_size_is_not_carried_out() -> None:
    """The Deployment was created, or scaled by somebody, between the law's look and its decision's turn."""
    asked = pool(minReplicas=1, maxReplicas=8)
    before = PoolView(None, [])
    verdict = Scaler(MetricsStore(release="default.demo"), Shares()).decide(asked, ScalingPolicy(), before, NOW)
    assert (verdict.observation.replicas, verdict.decision.desired) == (1, 1)
    for size in (1, 5):
        assert wanted_replicas(asked, PoolView(deployment_body(size), []), verdict) == size
    assert wanted_replicas(asked, before, verdict) == 1
    pinned = pool(minReplicas=1, maxReplicas=8, replicas=3)
    assert wanted_replicas(pinned, PoolView(deployment_body(5), []), verdict) == 3


# -- what is learnt of a pool


def learned_by(scaler: Scaler, asked: EnginePool, status: LearnedStatus | None, now_s: float = NOW) -> LearnedStatus:
    """What a scaler knows after a decision about a pool with this in its status."""
    shown = replace(asked, status=EnginePoolStatus(learned=status))
    return scaler.decide(shown, ScalingPolicy(), PoolView(deployment_body(1), []), now_s).learned


def new_scaler() -> Scaler:
    return Scaler(MetricsStore(release="default.demo"), Shares())


def test_an_operator_that_starts_knows_what_the_status_says_about_the_same_engines() -> None:
    asked = pool()
    first = learned_by(new_scaler(), asked, None)
    assert (first.capacity, first.capacity_time) == (None, None)
    known = first.model_copy(update={"capacity": 512.5, "capacity_time": api_time(NOW - 600)})
    again = learned_by(new_scaler(), asked, known)
    assert (again.capacity, again.capacity_time) == (512.5, api_time(NOW - 600))
    others = known.model_copy(update={"card": "another"})
    assert learned_by(new_scaler(), asked, others).capacity is None
    for time in ("yesterday", "0001-01-01T00:00:00Z"):
        odd = known.model_copy(update={"capacity_time": time, "rise": 5.0, "rise_time": time})
        assert learned_by(new_scaler(), asked, odd).capacity is None
    assert learned_by(new_scaler(), asked, known.model_copy(update={"believed": None})).believed == 1


def test_a_replica_that_follows_learns_what_the_leader_measured() -> None:
    asked, follower = pool(), new_scaler()
    known = learned_by(follower, asked, None)
    later = known.model_copy(update={"capacity": 512.5, "capacity_time": api_time(NOW)})
    assert learned_by(follower, asked, later, NOW + 1).capacity == 512.5
    earlier = known.model_copy(update={"capacity": 100.0, "capacity_time": api_time(NOW - 60)})
    assert learned_by(follower, asked, earlier, NOW + 2).capacity == 512.5


def test_another_model_is_measured_anew() -> None:
    asked, scaler = pool(), new_scaler()
    known = learned_by(scaler, asked, None).model_copy(update={"capacity": 512.5, "capacity_time": api_time(NOW)})
    assert learned_by(scaler, asked, known).capacity == 512.5
    model = asked.spec.model.model_copy(update={"served_name": "other"})
    changed_pool = replace(asked, spec=asked.spec.model_copy(update={"model": model}))
    assert learned_by(scaler, changed_pool, known, NOW + 1).capacity is None
    assert learned_by(scaler, asked, known, NOW + 2).capacity == 512.5, "the change was taken back"


def test_what_is_learnt_is_kept_where_nothing_is_decided_and_its_time_alone_is_no_difference() -> None:
    known = LearnedStatus(card="x", capacity=512.5, rise=10.0, rise_time=api_time(NOW))
    moved = known.model_copy(update={"rise_time": api_time(NOW + 60)})
    assert status(learned=known).learned == known
    assert not differs(status(learned=moved), status(learned=known))
    measured = known.model_copy(update={"capacity": 500.0})
    assert differs(status(learned=measured), status(learned=known))
    assert not differs_in_substance(status(learned=measured), status(learned=known))
