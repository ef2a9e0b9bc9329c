from dataclasses import replace
from typing import Any

from pagestream_operator.api import EnginePoolStatus
from pagestream_operator.kube.pods import Pod
from pagestream_operator.metrics import MetricsStore
from pagestream_operator.pool.scaler import (
    Scaler,
    first_replicas,
    mean_utilization,
    wanted_replicas,
    without_spares,
)
from pagestream_operator.pool.shares import Shares
from pagestream_operator.pool.view import PoolView
from pagestream_scaling import (
    PodObservation,
    PodSample,
    PodState,
    PoolObservation,
    SamplesPolicy,
    ScalingMemory,
    ScalingPolicy,
    StartupPolicy,
)
from pagestream_scaling.samples import valid_samples
from pagestream_scaling.supply import supply
from support.kubernetes.pool_objects import deployment_body, pod_body, pool

NOW = 1_767_225_600.0


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
    counted = supply(observation, valid_samples(observation, SamplesPolicy()), ScalingMemory(), StartupPolicy())
    assert (counted.overdue, counted.expected) == (0, 1)


def test_an_engine_that_changes_its_model_is_counted_on() -> None:
    """By the time of its start it would be overdue at once, and another pod be ordered for each change."""
    changes = Pod.from_object(pod_body("changes", ready=False))
    now_s = changes.created_s + 35  # it lost its readiness 15 s ago
    for starts_anew, expected in ((False, 0), (True, 1)):
        seen = PoolObservation(now_s, 1, (changes.observed(None, now_s, starts_anew=starts_anew),))
        policy = StartupPolicy(prior_s=10.0)
        assert supply(seen, valid_samples(seen, SamplesPolicy()), ScalingMemory(), policy).expected == expected


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
