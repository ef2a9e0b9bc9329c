"""The rounds of a soak, and what came of them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, quantiles

import grpc
from campaigns.soaking.faults import API_SERVER, BURST_S, Faults, Replica, play
from campaigns.soaking.orders import HOME, Fleet
from campaigns.soaking.state import differences, unsettled
from support.kubernetes.control_plane import ControlPlane, eventually
from support.kubernetes.faulty_api import faulty_api
from support.kubernetes.kubelet import Kubelet, running_kubelet
from support.kubernetes.operator_process import OperatorProcess, install_definition
from support.network.toxiproxy import running_toxiproxy

CONVERGED_S = 30.0
"""Seconds after the last fault in which all pools are as ordered."""
GIVE_UP_S = 180.0
"""Seconds after which a pool counts as lost, and the soak ends."""
SERVER_READY_S = 120.0
NAMES = ("one", "two")
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/pagestream-operator"
MOST_GROWTH = 1.10
"""The mean memory of the last quarter, as a part of the first one's."""
ROUNDS_FOR_MEMORY = 100
"""Rounds from which on memory is judged: caches fill in the first ten, and quarters have as many pools on average."""
_POLL_S = 0.5
_EXPORT_S = 2.0
_LOOK_S = 1.0
_JOIN_S = 30.0
_SHOWN = 4


@dataclass
class Report:
    """What came of a soak."""

    seed: int
    minutes: float = 0.0
    rounds: int = 0
    orders: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    converged_s: list[float] = field(default_factory=list)
    """By round: seconds from the last fault until all pools were as ordered."""
    memory_mib: list[float] = field(default_factory=list)
    """By round: of the replica that runs all the time."""
    open_files: list[int] = field(default_factory=list)
    terms: int = 0
    """How often leadership has changed."""
    failures: list[str] = field(default_factory=list)

    def check_memory(self) -> None:
        """Add a failure where the memory has grown."""
        if self.rounds >= ROUNDS_FOR_MEMORY:
            first, last = quarters(self.memory_mib)
            if last > MOST_GROWTH * first:
                self.failures.append(f"the memory grew from {first:.0f} to {last:.0f} MiB")

    def table(self) -> str:
        """Format the figures as tables in Markdown."""
        spread = quantiles(self.converged_s, n=100, method="inclusive") if len(self.converged_s) > 1 else [0.0] * 99
        memory, files = quarters(self.memory_mib), quarters([float(each) for each in self.open_files])
        rows = {
            "seed, minutes, rounds": f"{self.seed}, {self.minutes:.0f}, {self.rounds}",
            "orders, faults": f"{self.orders.total()}, {self.faults.total()}",
            "changes of leadership": str(self.terms),
            "from the last fault until all pools are as ordered: p50, p99, max": (
                f"{spread[49]:.1f} s, {spread[98]:.1f} s, {max(self.converged_s, default=0.0):.1f} s"
            ),
            "memory of the replica that ran all the time: first, last quarter": f"{memory[0]:.0f}, {memory[1]:.0f} MiB",
            "its open files: first, last quarter": f"{files[0]:.0f}, {files[1]:.0f}",
            "failures": str(len(self.failures)),
        }
        tables = [
            ("what", "figure", rows),
            ("fault", "times", _counts(self.faults)),
            ("order", "times", _counts(self.orders)),
        ]
        return "\n\n".join(_table(*each) for each in tables)


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last quarter."""
    if not values:
        return 0.0, 0.0
    count = max(1, len(values) // 4)
    return fmean(values[:count]), fmean(values[-count:])


def _counts(counts: Counter[str]) -> dict[str, str]:
    return {what: str(count) for what, count in counts.most_common()}


def _table(first: str, second: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {what} | {said} |" for what, said in rows.items()]
    return "\n".join([f"| {first} | {second} |", "|---|---|", *lines])


@contextmanager
def running(name: str, work: threading.Thread, stop: threading.Event) -> Iterator[None]:
    """Run a thread for the length of a block."""
    work.start()
    try:
        yield
    finally:
        stop.set()
        work.join(_JOIN_S)
        if work.is_alive():
            raise TimeoutError(f"{name} has not ended")


@contextmanager
def loading(fleet: Fleet, kubelet: Kubelet, replicas: Sequence[Replica]) -> Iterator[None]:
    """Export the load of all pools to both replicas, as a collector does."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(_EXPORT_S):
            load = fleet.load(kubelet.ready_pods())
            for each in replicas:
                try:
                    each.process.export_metrics(load, limit_s=_EXPORT_S)
                except grpc.RpcError:
                    continue  # it is away, or paused

    with running("the load", threading.Thread(target=work, name="load"), stop):
        yield


@contextmanager
def watching_leaders(replicas: Sequence[Replica], failures: list[str]) -> Iterator[None]:
    """Look every second that no two replicas lead at once."""
    stop = threading.Event()

    def leads(replica: Replica) -> bool:
        try:
            return replica.process.leads()
        except OSError:
            return False

    def work() -> None:
        first, second = replicas
        while not stop.wait(_LOOK_S):
            # Each is asked in turn: the first one led before and after the second one did.
            if leads(first) and leads(second) and leads(first):
                failures.append("two replicas led at a time")

    with running("the look at leaders", threading.Thread(target=work, name="leaders"), stop):
        yield


class Soak:
    """The rounds of a soak."""

    def __init__(self, fleet: Fleet, replicas: Sequence[Replica], rng: random.Random, report: Report) -> None:
        self._fleet, self._replicas, self._rng, self._report = fleet, replicas, rng, report
        self.faults = Faults(fleet.kube, replicas, rng)

    def run(self, until_s: float, limit_s: float) -> None:
        """Play rounds until `time.monotonic()` is `until_s`, then end all pools."""
        while time.monotonic() < until_s:
            self._round(limit_s)
        self._restart_both(limit_s)
        eventually(lambda: not unsettled(self._fleet), "as few pods as the law asks for without load", GIVE_UP_S)
        self._fleet.end()
        self._converge("the end of all pools", max(limit_s, GIVE_UP_S / 2))
        eventually(lambda: not self._ending_namespaces(), "the end of all namespaces", GIVE_UP_S)

    def _round(self, limit_s: float) -> None:
        self._fleet.prepare()
        faults = self.faults.draw()
        orders = [self._rng.uniform(0, BURST_S) for _ in range(self._rng.randint(3, 6))]
        play(faults, orders, self._fleet.order)
        self._fleet.kube.wait_ready(SERVER_READY_S)
        if any(fault.kind == API_SERVER for fault in faults):
            # Their pauses between tries would outlast several rounds.
            self._fleet.kube.restart_controllers()
        self._report.rounds += 1
        self._converge("; ".join(map(str, faults)), limit_s)
        pid = self._replicas[0].process.pid
        self._report.memory_mib.append(_memory_mib(pid))
        self._report.open_files.append(sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))

    def _restart_both(self, limit_s: float) -> None:
        """Kill both replicas at once, so that nobody remembers anything."""
        for each in self._replicas:
            each.process.kill()
            each.process.start()
        self._converge("both operators killed", limit_s)

    def _converge(self, what: str, limit_s: float) -> None:
        """Wait until all is as ordered."""
        self._fleet.catch_up()
        began, report, before = time.monotonic(), self._report, list[str]()
        while found := differences(self._fleet, self._replicas):
            took = time.monotonic() - began
            dead = [each.process.name for each in self._replicas if not each.process.is_alive()]
            if dead:
                raise RuntimeError(f"operator {' and '.join(dead)} ended by itself")
            if took > GIVE_UP_S:
                raise TimeoutError(f"after {took:.0f} s: {'; '.join(found)}")
            before = found
            time.sleep(_POLL_S)
        took = time.monotonic() - began
        report.converged_s.append(took)
        if took > limit_s:
            report.failures.append(f"round {report.rounds} ({what}): {took:.1f} s; last: {'; '.join(before[:_SHOWN])}")
        memory_mib, pools = _memory_mib(self._replicas[0].process.pid), len(self._fleet.pools)
        print(f"{report.rounds}: {what}; {pools} pools, {took:.1f} s, {memory_mib:.0f} MiB", flush=True)

    def _ending_namespaces(self) -> bool:
        there = {each["metadata"]["name"] for each in self._fleet.kube.get("/api/v1/namespaces")["items"]}
        return bool(there.intersection(self._fleet.ending))


def _memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1024


def soak(folder: Path, *, minutes: float, seed: int, limit_s: float = CONVERGED_S) -> Report:
    """Run a soak with its files in `folder`.

    Args:
        folder: for the logs of all processes.
        minutes: after which no further round begins.
        seed: of orders and faults.
        limit_s: seconds from the last fault after which a round has failed.
    """
    rng, report = random.Random(seed), Report(seed)
    with ExitStack() as stack:
        kube = stack.enter_context(ControlPlane(folder / "kube", controllers=True))
        install_definition(kube)
        fleet = Fleet(kube, rng)
        kubelet = stack.enter_context(running_kubelet(kube, seed=seed))
        toxiproxy = stack.enter_context(running_toxiproxy(folder))
        replicas = []
        for place, name in enumerate(NAMES):
            api = stack.enter_context(faulty_api(kube.url, folder / name, seed=seed + place))
            link = toxiproxy.link(name, api.port)
            settings = {"POD_NAMESPACE": HOME, "STATUS_S": "10", "RESYNC_S": "300"}
            process = OperatorProcess(name, kube.kubeconfig_at(link.port), folder, "*", settings)
            stack.callback(process.stop)
            process.start()
            replicas.append(Replica(process, link, api))
        for each in replicas:
            each.process.wait_ready()
        eventually(lambda: any(each.process.leads() for each in replicas), "a leader")
        stack.enter_context(loading(fleet, kubelet, replicas))
        stack.enter_context(watching_leaders(replicas, report.failures))
        began, rounds = time.monotonic(), Soak(fleet, replicas, rng, report)
        try:
            rounds.run(began + 60 * minutes, limit_s)
        except (TimeoutError, RuntimeError) as error:
            report.failures.append(str(error))
        report.minutes = (time.monotonic() - began) / 60
        report.orders, report.faults = fleet.placed, rounds.faults.begun
        report.terms = int(kube.get(LEASE)["spec"]["leaseTransitions"])
    report.check_memory()
    return report
