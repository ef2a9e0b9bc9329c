from typing import Any

import pytest
from pagestream_operator.kube.pods import Pod, unix_seconds
from pagestream_scaling import PodState
from support.kubernetes.pool_objects import CREATED, pod_body


def test_a_ready_pod_says_since_when() -> None:
    pod = Pod.from_object(pod_body("a"))
    assert pod.state is PodState.READY
    assert pod.ready_s == unix_seconds(CREATED) + 20
    assert pod.blocking_reason is None


@pytest.mark.parametrize(
    ("body", "state"),
    [
        (pod_body("a", ready=False), PodState.STARTING),
        (pod_body("a", ending=True), PodState.DRAINING),
        (pod_body("a", ready=False, ending=True), PodState.DRAINING),
    ],
)
def test_states(body: dict[str, Any], state: PodState) -> None:
    assert Pod.from_object(body).state is state


def test_a_container_that_waits_for_an_administrator_is_blocked() -> None:
    body = pod_body("a", ready=False)
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
    body["status"]["containerStatuses"] = [{"state": {"waiting": waiting}}]
    assert Pod.from_object(body).blocking_reason == "CrashLoopBackOff: back-off 10s"


def test_a_container_that_is_only_being_created_is_not_blocked() -> None:
    body = pod_body("a", ready=False)
    body["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ContainerCreating"}}}]
    assert Pod.from_object(body).blocking_reason is None


def test_a_pod_that_fits_nowhere_is_blocked() -> None:
    body = pod_body("a", ready=False)
    body["status"]["conditions"].append(
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    )
    assert Pod.from_object(body).blocking_reason == "Unschedulable: 0/1 nodes"


def test_a_pod_that_has_ended_is_terminated() -> None:
    body = pod_body("a")
    body["status"]["phase"] = "Failed"
    assert Pod.from_object(body).is_terminated
