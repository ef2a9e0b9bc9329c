"""The release that the cluster tests disturb, and the times that they record."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cluster.load import Content, Load, Question, steady_load
from cluster.resources import Namespace, Object, Release, name_of, wait_for
from pagestream_operator.children import METRICS_PORT
from prometheus_client.parser import text_string_to_metric_families
from support.kubernetes.api import CommandError, run_tool

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "build" / "images"
CHART = ROOT / "helm" / "pagestream"
VALUES = ROOT / "tests" / "cluster" / "values.yaml"
NAMESPACE = Namespace("pagestream-test")

sys.path.insert(0, str(ROOT / "deploy" / "images"))
import archive  # noqa: E402, F401 - for tests of images

WIDTH = 6


@dataclass
class Times:
    """A table of durations."""

    rows: list[tuple[str, str]] = field(default_factory=list)

    def note(self, what: str, value: float | str, unit: str = "s") -> None:
        """Add a row."""
        text = value if isinstance(value, str) else f"{value:.1f} {unit}"
        self.rows.append((what, text))

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Time a block that succeeds."""
        begin = time.monotonic()
        yield
        self.note(what, time.monotonic() - begin)

    def table(self) -> str:
        """Format the table in Markdown."""
        lines = ["| what | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in self.rows)]
        return "\n".join(lines) + "\n"


def make_namespace(space: Namespace) -> None:
    """A fresh namespace that admits only restricted pods."""
    with suppress(CommandError):
        run_tool("kubectl", "delete", "namespace", space.name, "--wait", "--timeout", "120s", limit_s=130)
    run_tool("kubectl", "create", "namespace", space.name)
    run_tool("kubectl", "label", "namespace", space.name, "pod-security.kubernetes.io/enforce=restricted")


def wait_for_pool(name: str, replicas: int, space: Namespace = NAMESPACE) -> None:
    """Wait until a pool has exactly `replicas` pods, all of them ready and of the newest template."""

    def is_there() -> bool:
        pool = space.get("enginepool", name)
        status = pool.get("status", {})
        counts = (status.get(each, 0) for each in ("replicas", "readyReplicas", "updatedReplicas"))
        seen = status.get("observedGeneration") == pool["metadata"]["generation"]
        if not seen or any(count != replicas for count in counts) or status.get("drainingReplicas", 0):
            return False
        # The operator has acted; whether its Deployment's controller has, too, only the Deployment can say.
        made = space.get("deployment", f"{name}-engine")
        is_observed = made["status"].get("observedGeneration") == made["metadata"]["generation"]
        counts = (made["status"].get(each, 0) for each in ("replicas", "readyReplicas", "updatedReplicas"))
        return is_observed and all(count == replicas for count in counts)

    wait_for(f"{replicas} ready pods of pool {name}", is_there, limit_s=120.0)


@dataclass(frozen=True)
class Scene:
    """The release with one of its pools, and streams whose answers are known."""

    release: Release
    target: str
    """host:port of the gateways' Service for gRPC."""
    api_key: str
    questions: list[Question]
    answers: dict[int, Content]
    times: Times
    name: str = "demo"
    """The pool's."""
    width: int = WIDTH
    """Streams that are open at any time."""

    @property
    def engines(self) -> str:
        """Labels of the pool's pods."""
        return f"pagestream.dev/pool={self.name}"

    @property
    def pool(self) -> Object:
        """The pool."""
        return NAMESPACE.get("enginepool", self.name)

    def patch(self, **spec: object) -> None:
        """Change the pool's spec."""
        change = json.dumps({"spec": spec})
        NAMESPACE.kubectl("patch", "enginepool", self.name, "--type=merge", "--patch", change)

    def pin(self, replicas: int) -> None:
        """`kubectl scale`."""
        NAMESPACE.kubectl("scale", "enginepool", self.name, f"--replicas={replicas}")

    def pods(self) -> set[str]:
        """Names of the pool's pods."""
        return {name_of(pod) for pod in NAMESPACE.pods(self.engines)}

    async def settled(self, replicas: int) -> None:
        """Wait until the pool has `replicas` ready pods of the newest template."""
        await asyncio.to_thread(wait_for_pool, self.name, replicas)

    async def until(self, what: str, condition: Callable[[], object], *, limit_s: float = 60.0) -> None:
        """Wait for a condition beside the streams."""
        await asyncio.to_thread(wait_for, what, lambda: condition() or None, limit_s=limit_s)

    def load(self, *, width: int | None = None, compared: bool = True) -> AbstractAsyncContextManager[Load]:
        """Run streams for the length of a block. Each must end with the known tokens."""
        answers = self.answers if compared else None
        return steady_load([self.target], self.api_key, self.questions, answers, width=width or self.width)

    @asynccontextmanager
    async def disturbed(self, what: str, disturb: Callable[[], object]) -> AsyncIterator[Load]:
        """Run streams, and call `disturb` while they are open. All of them must end with the known tokens."""
        async with self.load() as load:
            await load.wait_under_way()
            await asyncio.to_thread(disturb)
            yield load
            await load.wait_marked()
            await load.wait_finished(2)
            self.times.note(f"{what}: longest silence of a stream", load.longest_silence_s)


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
    next ones. Raises CommandError where none come.
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
