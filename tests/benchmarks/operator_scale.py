"""The load of 50 pools and 1,000 pods, simulated by kwok, on one operator, a real API server and its controllers.

    KUBEBUILDER_ASSETS=... PATH=<folder of kwok>:$PATH .venv/bin/python tests/benchmarks/operator_scale.py

Prints a table of what it takes to bring the pods up, to decide each second with fresh samples of all, and when idle.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics
from support.kubernetes.api import kube_binary
from support.kubernetes.control_plane import ControlPlane, eventually
from support.kubernetes.operator_process import OperatorProcess, PoolWorld, install_definition, running_operator
from support.telemetry.otlp_messages import export, gauge, resource

NODES = 10
PODS_PER_NODE = 250
EXPORT_S = 2.0
LIMIT_S = 300.0
DURATION = "pagestream_operator_reconcile_duration_seconds_bucket"


@dataclass(frozen=True)
class Row:
    """The figures of a phase."""

    phase: str
    seconds: float
    passes: float
    p50_ms: str
    p99_ms: str
    calls_per_minute: float
    cpu_percent: float
    memory_mib: float

    def __str__(self) -> str:
        """Format a line of the table."""
        return (
            f"| {self.phase} | {self.seconds:.0f} | {self.passes:.0f} | {self.p50_ms} | {self.p99_ms} "
            f"| {self.calls_per_minute:.0f} | {self.cpu_percent:.0f} | {self.memory_mib:.0f} |"
        )


class Meter:
    """Measures an operator between two moments."""

    def __init__(self, operator: OperatorProcess) -> None:
        self._operator = operator
        self.reset()

    def reset(self) -> None:
        """Start measuring now."""
        self._start, self._buckets, self._calls = time.monotonic(), self._histogram(), self._operator.calls()
        self._cpu_s = self._cpu()

    def row(self, phase: str) -> Row:
        """Return the figures since `reset`."""
        seconds = time.monotonic() - self._start
        before, after = self._buckets, self._histogram()
        counts = {bound: after[bound] - before.get(bound, 0) for bound in after}
        row = Row(
            phase,
            seconds,
            max(counts.values()),
            _quantile(counts, 0.50),
            _quantile(counts, 0.99),
            (self._operator.calls() - self._calls) / seconds * 60,
            (self._cpu() - self._cpu_s) / seconds * 100,
            self._memory(),
        )
        print(row, flush=True)
        return row

    def _histogram(self) -> dict[float, float]:
        found = {}
        for labels, count in self._operator.figures(DURATION).items():
            bound = labels.split('le="')[1].split('"')[0]
            found[float(bound)] = count
        return found

    @property
    def _pid(self) -> int:
        if self._operator.process is None:
            raise RuntimeError("the operator does not run")
        return self._operator.process.pid

    def _cpu(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def _memory(self) -> float:
        line = next(line for line in Path(f"/proc/{self._pid}/status").read_text().splitlines() if "VmRSS" in line)
        return int(line.split()[1]) / 1024


def _quantile(counts: dict[float, float], share: float) -> str:
    """Return the upper bound of the quantile's bucket in milliseconds."""
    total = max(counts.values())
    bound = next((bound for bound in sorted(counts) if counts[bound] >= share * total), float("inf"))
    return f"<= {bound * 1000:g}"


@contextmanager
def kwok(kube: ControlPlane) -> Iterator[None]:
    """Run kwok, which simulates nodes and pods."""
    for number in range(NODES):
        name = f"kwok-{number}"
        kube.post("/api/v1/nodes", {"metadata": {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}}})
        room = {"cpu": "1000", "memory": "1000Gi", "pods": str(PODS_PER_NODE)}
        kube.merge(f"/api/v1/nodes/{name}/status", {"status": {"allocatable": room, "capacity": room}})
        # A new node is tainted until its controller, which doesn't run here, finds it ready.
        kube.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
    command = [kube_binary("kwok"), "--kubeconfig", str(kube.kubeconfig), "--manage-all-nodes=true"]
    with (kube.folder / "kwok.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def exporting(world: PoolWorld, operator: OperatorProcess, pools: list[str]) -> Iterator[None]:
    """Export the metrics of all engines and a gateway every 2 s, as a collector does."""
    stop = threading.Event()
    pods = {pool: [pod["metadata"]["name"] for pod in world.pods(pool)] for pool in pools}

    def run() -> None:
        while not stop.is_set():
            now, own = time.time(), {"namespace": world.namespace}
            metrics = [_engine(now, pod, pool, own) for pool in pools for pod in pods[pool]]
            metrics += [_gateway(now, pools, own)]
            try:
                operator.export_metrics(export(*metrics))
            except grpc.RpcError as error:
                print(f"an export was lost: {error}", file=sys.stderr)
            stop.wait(max(0.0, EXPORT_S - (time.time() - now)))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def _gateway(now: float, pools: list[str], own: dict[str, str]) -> ResourceMetrics:
    queue = {"depth": 0, "tokens": 0, "age": 0, "running": 60, "drain_rate": 2000}
    metrics = [
        gauge(f"pagestream.queue.{name}", now, value, {"gen_ai.request.model": pool})
        for pool in pools
        for name, value in queue.items()
    ]
    return resource(metrics, **own, instance="gateway-0")


def _engine(now: float, pod: str, pool: str, own: dict[str, str]) -> ResourceMetrics:
    values = {"kv.utilization": 0.7, "requests.running": 3, "requests.waiting": 0}
    gauges = [gauge(f"pagestream.{name}", now, value) for name, value in values.items()]
    return resource(gauges, **own, pool=pool, pod=pod, instance=pod)


def measure(pools: int, pods: int, steady_s: float, folder: Path) -> None:
    """Measure all phases."""
    names = [f"pool-{number}" for number in range(pools)]
    with ExitStack() as stack:
        kube = stack.enter_context(ControlPlane(folder, controllers=True, scheduler=True))
        install_definition(kube)
        stack.enter_context(kwok(kube))
        world = PoolWorld(kube, "scale")
        kube.merge("/api/v1/nodes/paper", {"spec": {"unschedulable": True}})
        operator = stack.enter_context(running_operator(kube, "scale", STATUS_S="10"))
        eventually(operator.leads, "a leader")
        meter = Meter(operator)
        for name in names:
            world.create(name, minReplicas=pods // pools, maxReplicas=2 * pods // pools)
        wanted = {f'k8s_namespace_name="scale",pagestream_pool="{name}"': pods // pools for name in names}
        eventually(
            lambda: operator.figures("pagestream_operator_ready_replicas") == wanted, f"{pods} ready pods", LIMIT_S
        )
        meter.row("creation to the last ready pod")
        with exporting(world, operator, names):
            time.sleep(10)  # the law adapts to the samples
            meter.reset()
            time.sleep(steady_s)
            meter.row("samples of all pods every 2 s, a decision a second")
            for name in names:
                world.change({"engine": {"maxNumSeqs": 64}}, name)
            meter.reset()
            time.sleep(steady_s)
            meter.row("all pools replace all pods")
        time.sleep(30)
        meter.reset()
        time.sleep(steady_s)
        meter.row("at rest, without samples")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=50)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--steady-s", type=float, default=60)
    given = parser.parse_args()
    print("| phase | s | passes | p50 of a pass, ms | p99, ms | API calls a minute | CPU, % of a core | memory, MiB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        measure(given.pools, given.pods, given.steady_s, Path(folder))


if __name__ == "__main__":
    main()
