"""A real cluster with nodes, as kubectl and helm see it, and the processes that run on a node of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from support.kubernetes.api import CommandError, run_tool
from support.processes.waiting import LIMIT_S
from support.redis.servers import skip_for_want_of

POLL_S = 0.25
T = TypeVar("T")
Object = dict[str, Any]


def reachable_cluster() -> None:
    """Skip the test where no cluster can be used."""
    for name in ("kubectl", "helm"):
        if shutil.which(name) is None:
            skip_for_want_of("cluster", f"{name} is not on the PATH")
    if not os.environ.get("KUBECONFIG"):
        skip_for_want_of("cluster", "KUBECONFIG names no cluster")


def wait_for(what: str, attempt: Callable[[], T | None], *, limit_s: float) -> T:
    """Call `attempt` until it returns something. A command that fails is tried again. Raises CommandError."""
    end = time.monotonic() + limit_s
    seen: object = None
    while time.monotonic() < end:
        try:
            found = attempt()
        except CommandError as error:
            seen, found = error, None
        if found is not None and found is not False:
            return found
        time.sleep(POLL_S)
    raise CommandError(f"waited {limit_s:.0f} s for {what} without success" + (f"; last: {seen}" if seen else ""))


@dataclass(frozen=True)
class Namespace:
    """One namespace of the cluster."""

    name: str

    def kubectl(self, *command: str, text: str | None = None, limit_s: float = LIMIT_S, fails: bool = False) -> str:
        """kubectl in this namespace."""
        return run_tool("kubectl", "--namespace", self.name, *command, text=text, limit_s=limit_s, fails=fails)

    def get(self, kind: str, name: str) -> Object:
        """An object. Raises CommandError where it isn't there."""
        found: Object = json.loads(self.kubectl("get", kind, name, "--output", "json"))
        return found

    def find(self, kind: str, selector: str = "") -> list[Object]:
        """The objects of a kind with these labels."""
        chosen = ["--selector", selector] if selector else []
        items: list[Object] = json.loads(self.kubectl("get", kind, *chosen, "--output", "json"))["items"]
        return items

    def pods(self, selector: str) -> list[Object]:
        """Pods that are neither ending nor over."""
        return [
            pod
            for pod in self.find("pods", selector)
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") in ("Pending", "Running")
        ]

    def ready_pods(self, selector: str) -> list[str]:
        """Names of ready pods."""
        return [name_of(pod) for pod in self.pods(selector) if is_ready(pod)]

    def secret(self, name: str, key: str) -> str:
        """A value of a Secret."""
        text = self.kubectl(
            "get", "secret", name, "--output", f"go-template={{{{index .data {json.dumps(key)} | base64decode}}}}"
        )
        return text.strip()

    def service_address(self, name: str) -> str:
        """A Service's own address, which this machine must be able to reach."""
        address: str = self.get("service", name)["spec"]["clusterIP"]
        return address

    def describe(self) -> str:
        """Objects, events and logs of the namespace, for the report of a failure."""
        parts = [self._try("get", "enginepools,pods", "--output", "wide")]
        parts.append(self._try("get", "enginepools", "--output", "yaml"))
        parts.append(self._try("get", "events", "--sort-by", ".lastTimestamp")[-8000:])
        for pod in self._try("get", "pods", "--output", "name").split():
            parts.append(f"--- {pod}\n" + self._try("logs", pod, "--all-containers", "--tail", "40"))
            parts.append(
                f"--- {pod} before\n" + self._try("logs", pod, "--all-containers", "--tail", "20", "--previous")
            )
        return "\n".join(parts)

    def _try(self, *command: str) -> str:
        try:
            return self.kubectl(*command)
        except CommandError as error:
            return str(error)


def name_of(item: Object) -> str:
    """An object's name."""
    name: str = item["metadata"]["name"]
    return name


def is_ready(item: Object, kind: str = "Ready") -> bool:
    """Whether a condition of the object is true."""
    conditions = item.get("status", {}).get("conditions", [])
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def seconds_to_ready(pod: Object) -> float:
    """From the creation of a pod to its readiness, to the second, by the cluster's times."""
    ready = next(each for each in pod["status"]["conditions"] if each["type"] == "Ready")
    return _seconds(ready["lastTransitionTime"]) - _seconds(pod["metadata"]["creationTimestamp"])


def _seconds(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def process_of(pod: Object, container: str) -> int:
    """The process id, on this machine, of the first process of a container. Skips where the node is elsewhere."""
    status = next(each for each in pod["status"]["containerStatuses"] if each["name"] == container)
    container_id = status["containerID"].rpartition("/")[2]
    found = []
    for group in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            if container_id in group.read_text():
                found.append(int(group.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    if not found:
        skip_for_want_of("cluster", "the cluster's node is not this machine: its processes can't be killed from here")
    return min(found)


def send(pod: Object, container: str, number: signal.Signals) -> None:
    """Send a signal to a container's process, past Kubernetes."""
    os.kill(process_of(pod, container), number)


@dataclass(frozen=True)
class Release:
    """A release of the chart."""

    name: str
    namespace: Namespace
    chart: Path
    values: Mapping[str, object]
    """By path with dots, as `--set` takes them."""
    files: Sequence[Path] = ()

    def _settings(self, more: Mapping[str, object]) -> list[str]:
        chosen = [part for file in self.files for part in ("--values", str(file))]
        for path, value in {**self.values, **more}.items():
            chosen += ["--set-json", f"{path}={json.dumps(value)}"]
        return chosen

    def helm(self, *command: str) -> str:
        """helm in this release's namespace."""
        return run_tool("helm", "--namespace", self.namespace.name, *command, limit_s=300.0)

    @property
    def is_there(self) -> bool:
        """Whether it is installed."""
        return self.name in self.helm("list", "--short").split()

    def install(self, **more: object) -> str:
        """Install it, and wait until it is ready."""
        settings = self._settings({key.replace("__", "."): value for key, value in more.items()})
        return self.helm(
            "install", self.name, str(self.chart), "--create-namespace", "--wait", "--timeout", "240s", *settings
        )

    def upgrade(self, chart: Path | None = None, **more: object) -> str:
        """Upgrade it, with further values."""
        settings = self._settings({key.replace("__", "."): value for key, value in more.items()})
        return self.helm("upgrade", self.name, str(chart or self.chart), "--wait", "--timeout", "240s", *settings)

    def uninstall(self) -> str:
        """Uninstall it, and wait."""
        return self.helm("uninstall", self.name, "--wait", "--timeout", "240s")

    def selector(self, component: str) -> str:
        """Labels of a component's pods."""
        return f"app.kubernetes.io/name=pagestream-{component},app.kubernetes.io/instance={self.name}"
