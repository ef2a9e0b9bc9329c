"""A node that is pretended: pods are placed, become ready, and end, as a kubelet would have it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from support.kubernetes.control_plane import ControlPlane, Object, Refused
from support.processes.waiting import LIMIT_S

NODE = "paper"
_POLL_S = 0.4
_EXPECTED = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS)
"""What is answered about a pod that has gone or changed, or to a binding in a namespace that ends."""


class Kubelet:
    """Looks at all pods of the cluster a few times a second. Those of Jobs succeed, all others run until deleted."""

    def __init__(self, kube: ControlPlane, *, seed: int, most_start_s: float = 1.0) -> None:
        """`most_start_s`: how long a pod takes to become ready, at most."""
        self._kube, self._random, self._most_start_s = kube, random.Random(seed), most_start_s
        self._due: dict[str, float] = {}
        self._pods: Sequence[Object] = ()

    def ready_pods(self) -> list[Object]:
        """Return the pods that were ready at the last look."""
        return [pod for pod in self._pods if is_ready(pod)]

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set. An API server that does not answer is asked again."""
        while not stop.wait(_POLL_S):
            try:
                self._pods = self._kube.get("/api/v1/pods")["items"]
            except (Refused, OSError) as error:
                self._note(None, error)
                continue
            for pod in self._pods:
                try:
                    self._step(pod)
                except Refused as error:
                    self._note(pod, error)
                    if error.status not in _EXPECTED and error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                        raise
                except OSError as error:
                    self._note(pod, error)
                    break
            there = {pod["metadata"]["uid"] for pod in self._pods}
            self._due = {uid: due for uid, due in self._due.items() if uid in there}

    def _note(self, pod: Object | None, error: Exception) -> None:
        name = "all pods" if pod is None else pod["metadata"]["name"]
        with (self._kube.folder / "kubelet.log").open("a") as log:
            log.write(f"{_now()} {name}: {type(error).__name__}: {error}\n")

    def _step(self, pod: Object) -> None:
        metadata, phase = pod["metadata"], (pod.get("status") or {}).get("phase")
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if "deletionTimestamp" in metadata:
            self._kube.delete(path, gracePeriodSeconds=0, preconditions={"uid": metadata["uid"]})
        elif "nodeName" not in pod["spec"]:
            target = {"metadata": {"name": metadata["name"]}, "target": {"kind": "Node", "name": NODE}}
            self._kube.post(f"{path}/binding", target)
        elif phase == "Pending" and self._is_due(metadata["uid"]):
            self._kube.merge(f"{path}/status", {"status": _ended(pod) if _of_job(pod) else _running()})

    def _is_due(self, uid: str) -> bool:
        now = time.monotonic()
        return now >= self._due.setdefault(uid, now + self._random.uniform(0, self._most_start_s))


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready and not ending."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def _of_job(pod: Object) -> bool:
    return any(owner["kind"] == "Job" for owner in pod["metadata"].get("ownerReferences") or [])


def _running() -> Object:
    return {"phase": "Running", "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": _now()}]}


def _ended(pod: Object) -> Object:
    container, now = pod["spec"]["containers"][0], _now()
    ended = {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now, "containerID": "x://1"}
    of_container = {
        **{"name": container["name"], "image": container["image"], "imageID": ""},
        **{"ready": False, "restartCount": 0, "state": {"terminated": ended}},
    }
    return {"phase": "Succeeded", "containerStatuses": [of_container]}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def running_kubelet(kube: ControlPlane, *, seed: int) -> Iterator[Kubelet]:
    """Pretend a node for the length of a block, in a thread of its own."""
    if not kube.exists(f"/api/v1/nodes/{NODE}"):
        kube.post("/api/v1/nodes", {"metadata": {"name": NODE}})
    kubelet, stop = Kubelet(kube, seed=seed), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            kubelet.run(stop)
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=run, name="kubelet")
    thread.start()
    try:
        yield kubelet
    finally:
        stop.set()
        thread.join(LIMIT_S)
        if failures:
            raise failures[0]
