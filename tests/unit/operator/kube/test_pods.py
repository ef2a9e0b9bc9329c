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


def unscheduled(**condition: str) -> dict[str, Any]:
    body = pod_body("a", ready=False)
    body["status"]["conditions"].append({"type": "PodScheduled", "status": "False", **condition})
    return body


def test_a_pod_that_fits_nowhere_waits_and_is_not_late() -> None:
    pod = Pod.from_object(unscheduled(reason="Unschedulable", message="0/1 nodes"))
    assert (pod.blocking_reason, pod.waiting_reason, pod.scheduled_s) == (None, "0/1 nodes", None)
    an_hour_later = pod.created_s + 3600
    assert pod.observed(None, an_hour_later).created_s == an_hour_later


def test_a_pod_starts_when_it_gets_a_node() -> None:
    body = unscheduled()
    since = {"status": "True", "lastTransitionTime": "2026-01-01T01:00:00Z"}
    body["status"]["conditions"][-1] |= since
    pod = Pod.from_object(body)
    assert pod.scheduled_s == pod.observed(None, pod.created_s + 4000).created_s == pod.created_s + 3600
    body["status"]["conditions"][0] |= {"status": "True"}
    ready = Pod.from_object(body)
    assert ready.observed(None, ready.created_s + 4000).created_s == ready.created_s, "its start-up counts whole"


def test_a_pod_that_has_ended_is_terminated() -> None:
    body = pod_body("a")
    body["status"]["phase"] = "Failed"
    assert Pod.from_object(body).is_terminated
