"""Engine pods of a release: which of them works, and how to lose one."""

from __future__ import annotations

from pagestream_operator.children.container import METRICS_PORT
from prometheus_client.parser import text_string_to_metric_families
from support.kubernetes.cluster import Object, wait_for
from support.kubernetes.release import NAMESPACE, Scene

RUNNING_LIMIT_S = 60.0
# Inside of the pod: network policies may keep all other pods from its metrics.
READ_METRICS = f"""
from urllib.request import urlopen
print(urlopen("http://127.0.0.1:{METRICS_PORT}/metrics", timeout=5).read().decode())
"""


def delete_by_force(pod: str) -> None:
    """Delete a pod at once: its processes get SIGKILL."""
    NAMESPACE.kubectl("delete", "pod", pod, "--force", "--grace-period=0")


def num_running(pod: str) -> int:
    """How many sequences an engine runs now, by its metrics."""
    text = NAMESPACE.kubectl("exec", pod, "--container", "engine", "--", "python3", "-c", READ_METRICS)
    families = [each for each in text_string_to_metric_families(text) if each.name == "pagestream_requests_running"]
    return sum(int(sample.value) for family in families for sample in family.samples)


def busiest_engine(scene: Scene) -> Object:
    """The engine's pod that runs most. Choose it in the middle of the streams: the loss of one that runs none of
    them would not be noticed, and which engine runs how many is chance.

    Clients may be so far behind the engines that no engine runs any of their open streams: then this waits for their
    next ones. Raises ClusterError where none come.
    """

    def running() -> dict[str, int] | None:
        found = {pod: num_running(pod) for pod in NAMESPACE.ready_pods(scene.engines)}
        return found if any(found.values()) else None

    found = wait_for("an engine that runs something", running, limit_s=RUNNING_LIMIT_S)
    return NAMESPACE.get("pod", max(found, key=lambda pod: found[pod]))


def num_restarts(pod: str) -> int:
    """How often the pod's engine container was started anew."""
    (container,) = NAMESPACE.get("pod", pod)["status"]["containerStatuses"]
    return int(container["restartCount"])
