"""The pods of a pool: ordered, starting, ready, draining, gone; and what they cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagestream_scaling import PodObservation, PodSample, PodState, drain_order

from pagestream_simulator.fleet.fleet import EngineState, Fleet


@dataclass(slots=True)
class Pod:
    """One pod and its engine."""

    engine: int
    created_s: float
    ready_s: float
    drained_s: float = math.inf
    """When it was told to end."""
    sample: PodSample | None = None
    """What it last reported."""
    last: EngineState | None = None
    """And from what."""

    @property
    def name(self) -> str:
        """As Kubernetes would call it."""
        return f"engine-{self.engine}"


class Pods:
    """Orders and drains pods of a fleet, and counts what they cost."""

    def __init__(self, fleet: Fleet, startup_s: float) -> None:
        self._fleet = fleet
        self._startup_s = startup_s
        self._live: list[Pod] = []
        self._draining: list[Pod] = []
        self._ended_pod_s = 0.0
        self.num_up = 0
        """Pods ordered after the beginning."""
        self.num_down = 0
        """Pods given back."""

    @property
    def live(self) -> list[Pod]:
        """Those that start or serve."""
        return self._live

    def begin(self, count: int) -> None:
        """So many are ready when the trace begins; what came before is not counted."""
        for _ in range(count):
            self._live.append(Pod(self._fleet.add_engine(0.0), 0.0, 0.0))

    def scale(self, count: int, now_s: float) -> None:
        """Order pods, or drain the cheapest, until there are so many."""
        while len(self._live) < count:
            ready_s = now_s + self._startup_s
            self._live.append(Pod(self._fleet.add_engine(ready_s), now_s, ready_s))
            self.num_up += 1
        if len(self._live) > count:
            by_name = {pod.name: pod for pod in self._live}
            for seen in drain_order(self.observed(now_s))[: len(self._live) - count]:
                self._drain(by_name[seen.name], now_s)

    def observed(self, now_s: float) -> tuple[PodObservation, ...]:
        """The live pods as Kubernetes and their reports show them."""
        return tuple(
            PodObservation(pod.name, PodState.READY, pod.created_s, pod.ready_s, pod.sample)
            if pod.ready_s <= now_s
            else PodObservation(pod.name, PodState.STARTING, pod.created_s)
            for pod in self._live
        )

    def pod_seconds(self, end_s: float) -> float:
        """From each pod's order to its end, or to `end_s`."""
        self.settle(end_s)
        open_pods = (*self._live, *self._draining)
        return self._ended_pod_s + sum(max(0.0, end_s - pod.created_s) for pod in open_pods)

    def settle(self, end_s: float = math.inf) -> None:
        """Note which drained pods are gone."""
        still = []
        for pod in self._draining:
            gone_s = self._fleet.engine(pod.engine).gone_s
            if gone_s <= end_s and not math.isinf(gone_s):
                self._ended_pod_s += gone_s - pod.created_s
            else:
                still.append(pod)
        self._draining = still

    def _drain(self, pod: Pod, now_s: float) -> None:
        self._live.remove(pod)
        pod.drained_s = now_s
        self.num_down += 1
        self._fleet.drain(pod.engine)
        self._draining.append(pod)
