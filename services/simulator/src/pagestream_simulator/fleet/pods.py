"""The pods of a pool: ordered, starting, ready, draining, gone; and their cost in pod-seconds."""

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
    """When its drain began; infinity before."""
    sample: PodSample | None = None
    """Its last export."""
    last: EngineState | None = None
    """The engine's state at that export."""

    @property
    def name(self) -> str:
        """The pod's name in observations."""
        return f"engine-{self.engine}"


class Pods:
    """Orders and drains pods of a fleet, and adds up their cost."""

    def __init__(self, fleet: Fleet, startup_s: float) -> None:
        self._fleet = fleet
        self._startup_s = startup_s
        self._live: list[Pod] = []
        self._draining: list[Pod] = []
        self._ended_pod_s = 0.0
        self.num_up = 0
        """Pods ordered by `scale`."""
        self.num_down = 0
        """Pods drained."""

    @property
    def live(self) -> list[Pod]:
        """Pods that start or serve."""
        return self._live

    def begin(self, count: int) -> None:
        """Add `count` pods that are ready when the trace begins; their start-up costs nothing."""
        for _ in range(count):
            self._live.append(Pod(self._fleet.add_engine(0.0), 0.0, 0.0))

    def scale(self, count: int, now_s: float) -> None:
        """Order pods, or drain those that `drain_order` puts first, until `count` are live."""
        while len(self._live) < count:
            ready_s = now_s + self._startup_s
            self._live.append(Pod(self._fleet.add_engine(ready_s), now_s, ready_s))
            self.num_up += 1
        if len(self._live) > count:
            by_name = {pod.name: pod for pod in self._live}
            for seen in drain_order(self.observed(now_s))[: len(self._live) - count]:
                self._drain(by_name[seen.name], now_s)

    def observed(self, now_s: float) -> tuple[PodObservation, ...]:
        """Return the live pods as Kubernetes and their exports show them."""
        return tuple(
            PodObservation(pod.name, PodState.READY, pod.created_s, pod.ready_s, pod.sample)
            if pod.ready_s <= now_s
            else PodObservation(pod.name, PodState.STARTING, pod.created_s)
            for pod in self._live
        )

    def pod_seconds(self, end_s: float) -> float:
        """Return the seconds from each pod's order to its end, or to `end_s`, summed."""
        self.settle(end_s)
        open_pods = (*self._live, *self._draining)
        return self._ended_pod_s + sum(max(0.0, end_s - pod.created_s) for pod in open_pods)

    def settle(self, end_s: float = math.inf) -> None:
        """Add up the cost of drained pods that are gone by `end_s`."""
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
