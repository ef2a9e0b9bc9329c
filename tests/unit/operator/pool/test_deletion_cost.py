from pagestream_operator.kube.pods import DELETION_COST, Pod
from pagestream_operator.pool.deletion_cost import DeletionCost as Cost
from pagestream_operator.pool.deletion_cost import deletion_costs
from pagestream_scaling import PodObservation, PodSample
from support.kubernetes.pool_objects import pod_body


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
