from dataclasses import replace
from typing import Any

from pagestream_operator.api import EnginePoolStatus
from pagestream_operator.kube.pods import Pod
from pagestream_operator.pool.scaler import first_replicas, mean_utilization, without_spares
from pagestream_scaling import (
    PodObservation,
    PodSample,
    PodState,
    PoolObservation,
    SamplesPolicy,
    ScalingMemory,
    StartupPolicy,
)
from pagestream_scaling.samples import valid_samples
from pagestream_scaling.supply import supply
from support.kubernetes.pool_objects import pod_body, pool

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
