"""Faults between an operator and its API server, and of both: drawn, begun and ended at their times."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from support.kubernetes.control_plane import ControlPlane
from support.kubernetes.faulty_api import ErrorAnswers, FaultyApi
from support.kubernetes.operator_process import OperatorProcess
from support.network.toxiproxy import Link

LINK, ANSWERS, SERVER, PROCESS = "link", "answers", "server", "process"
API_SERVER, ETCD = "API server killed", "etcd killed"
BURST_S = 8.0
"""Seconds in which the faults of a burst begin."""
_SHORT_S, _LONG_S = (0.5, 6.0), (11.0, 15.0)
"""How long a fault lasts. A long one outlasts the operator's lease."""
_LONG_SHARE = 0.2
_DOWN_S = (0.5, 4.0)
"""How long a server is away."""
_FAULTS_OF_A_BURST = (2, 3, 3, 4)


@dataclass(frozen=True)
class Replica:
    """An operator, and its way to the API server."""

    process: OperatorProcess
    link: Link
    api: FaultyApi


@dataclass(frozen=True)
class Fault:
    """What is wrong from one moment to another, both from the beginning of a burst."""

    kind: str
    target: str
    begin_s: float
    end_s: float
    begin: Callable[[], None]
    end: Callable[[], None]

    def __str__(self) -> str:
        """Name it with its length."""
        return f"{self.kind} {self.target} {self.end_s - self.begin_s:.1f} s".replace("  ", " ")


_Way = tuple[Callable[[], None], Callable[[], None]]


class Faults:
    """Draws faults. The first replica is never ended, so that its memory can be watched for the whole run."""

    def __init__(self, kube: ControlPlane, replicas: Sequence[Replica], rng: random.Random) -> None:
        """`replicas`: two."""
        self._kube, self._replicas, self._rng = kube, replicas, rng
        self.begun: Counter[str] = Counter()
        self._of_link: Mapping[str, Callable[[Link], _Way]] = {
            "cut": lambda link: (link.cut, link.mend),
            "silence": self._silence,
            "delay": self._delay,
            "reset": self._reset,
            "truncated": self._truncated,
            "slow": self._slow,
        }
        self._answers: Mapping[str, Callable[[], ErrorAnswers]] = {
            "429": lambda: ErrorAnswers(429, self._share(), self._rng.choice([None, 1, 2])),
            "500": lambda: ErrorAnswers(500, self._share()),
            "503": lambda: ErrorAnswers(503, self._share()),
            "answer lost": lambda: ErrorAnswers(504, self._share(), takes_effect=True),
        }
        self._kinds = {
            **dict.fromkeys(self._of_link, LINK),
            **dict.fromkeys(self._answers, ANSWERS),
            API_SERVER: SERVER,
            ETCD: SERVER,
            "operator killed": PROCESS,
            "operator stopped": PROCESS,
            "operator paused": PROCESS,
        }

    def draw(self) -> list[Fault]:
        """Draw the faults of a burst: each kind once, of servers, processes and answers one at most."""
        count, drawn, groups = self._rng.choice(_FAULTS_OF_A_BURST), [], set()
        for kind in self._rng.sample(list(self._kinds), len(self._kinds)):
            group = self._kinds[kind]
            if len(drawn) < count and (group == LINK or group not in groups):
                groups.add(group)
                drawn += self._made(kind, group)
        return drawn

    def _made(self, kind: str, group: str) -> list[Fault]:
        """Make a fault, or two where it befalls both replicas."""
        begin_s = self._rng.uniform(0, BURST_S)
        long = self._rng.random() < _LONG_SHARE
        end_s = begin_s + self._rng.uniform(*(_LONG_S if long and group != SERVER else _SHORT_S))
        self.begun[kind] += 1
        if group == SERVER:
            end_s = begin_s + self._rng.uniform(*_DOWN_S)
            ways = {"": self._server(kind)}
        elif kind in ("operator killed", "operator stopped"):
            other = self._replicas[1].process
            ways = {"": self._ended(other, signal.SIGKILL if kind == "operator killed" else signal.SIGTERM)}
        else:
            names = self._rng.choice([[0], [1], [0, 1]])
            chosen = [self._replicas[place] for place in names]
            ways = {each.process.name: self._way(kind, group, each) for each in chosen}
        return [Fault(kind, target, begin_s, end_s, *way) for target, way in ways.items()]

    def _way(self, kind: str, group: str, replica: Replica) -> _Way:
        if group == LINK:
            return self._of_link[kind](replica.link)
        if group == ANSWERS:
            return self._answering(replica.api, self._answers[kind]())
        process = replica.process
        return lambda: process.signal(signal.SIGSTOP), lambda: process.signal(signal.SIGCONT)

    def _share(self) -> float:
        return self._rng.choice([0.3, 0.7, 1.0])

    # -- how each begins and ends

    def _silence(self, link: Link) -> _Way:
        """Nothing arrives, and no connection ends before the fault does."""

        def begin() -> None:
            link.add("timeout", timeout=0)
            link.add("timeout", stream="upstream", timeout=0)

        def end() -> None:
            link.remove("timeout")
            link.remove("timeout", stream="upstream")

        return begin, end

    def _delay(self, link: Link) -> _Way:
        latency = self._rng.choice([200, 1000, 3000])
        return (
            lambda: link.add("latency", latency=latency, jitter=latency // 2),
            lambda: link.remove("latency"),
        )

    def _reset(self, link: Link) -> _Way:
        after_ms = self._rng.choice([0, 50, 500])
        return lambda: link.add("reset_peer", timeout=after_ms), lambda: link.remove("reset_peer")

    def _truncated(self, link: Link) -> _Way:
        """Each connection ends in the middle of an answer."""
        most_bytes = self._rng.choice([3_000, 20_000])
        return lambda: link.add("limit_data", bytes=most_bytes), lambda: link.remove("limit_data")

    def _slow(self, link: Link) -> _Way:
        rate_kb_s = self._rng.choice([2, 20])
        return lambda: link.add("bandwidth", rate=rate_kb_s), lambda: link.remove("bandwidth")

    def _answering(self, api: FaultyApi, errors: ErrorAnswers) -> _Way:
        def begin() -> None:
            api.errors = errors

        def end() -> None:
            api.errors = None

        return begin, end

    def _server(self, kind: str) -> _Way:
        if kind == ETCD:
            return self._kube.kill_etcd, self._kube.start_etcd
        return self._kube.kill_server, self._kube.start_server

    def _ended(self, process: OperatorProcess, number: signal.Signals) -> _Way:
        def end() -> None:
            process.wait()
            process.start()

        return lambda: process.signal(number), end


def play(faults: Sequence[Fault], orders: Sequence[float], place_order: Callable[[], object]) -> None:
    """Begin and end the faults, and place orders, each at its time. All faults are over when it returns."""
    actions: list[tuple[float, Callable[[], object]]] = [(at_s, place_order) for at_s in orders]
    for fault in faults:
        actions += [(fault.begin_s, fault.begin), (fault.end_s, fault.end)]
    began = time.monotonic()
    for at_s, act in sorted(actions, key=lambda action: action[0]):
        time.sleep(max(0.0, began + at_s - time.monotonic()))
        act()
