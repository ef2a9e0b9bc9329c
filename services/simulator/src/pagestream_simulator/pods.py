"""The pods of a pool, their cost in pod-seconds, and the metrics that they export: as old as they would be."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from pagestream_scaling import (
    LatencyWindow,
    PodObservation,
    PodSample,
    PodState,
    PoolObservation,
    QueueSample,
    TtftPolicy,
    drain_order,
)
from pagestream_streams.settings import StreamsSettings
from pagestream_telemetry.catalog import TIME_TO_FIRST_TOKEN

from pagestream_simulator.fleet import EngineState, Fleet
from pagestream_simulator.load import Load


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

    def add_ready(self, count: int) -> None:
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
        self.add_up_ended(end_s)
        open_pods = (*self._live, *self._draining)
        return self._ended_pod_s + sum(max(0.0, end_s - pod.created_s) for pod in open_pods)

    def add_up_ended(self, end_s: float = math.inf) -> None:
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


TTFT_BOUNDS_S = TIME_TO_FIRST_TOKEN.bounds
TTFT_WINDOW_S = TtftPolicy().window_s
DRAIN_WINDOW_S = StreamsSettings().drain_window_ms / 1000


class Signals:
    """Exports of each pod and of the queue, every `export_s` seconds; a pod's first one comes when it is ready."""

    def __init__(self, fleet: Fleet, pods: Pods, load: Load, export_s: float) -> None:
        self._fleet, self._pods, self._load = fleet, pods, load
        self._export_s = export_s
        self._queue: QueueSample | None = None
        self._queue_due_s = 0.0
        self._claimed: deque[tuple[float, float]] = deque()  # (time, prompt tokens claimed so far)
        self._counts = np.zeros(len(TTFT_BOUNDS_S) + 1)
        self._num_firsts = 0
        self._windows: deque[tuple[float, np.ndarray[tuple[int], np.dtype[np.float64]]]] = deque()
        self._pod_due_s: dict[str, float] = {}

    def export(self, now_s: float) -> None:
        """Export the metrics of all pods and of the queue whose interval has passed."""
        for pod in self._pods.live:
            if pod.ready_s <= now_s and self._pod_due_s.get(pod.name, pod.ready_s) <= now_s:
                self._pod_due_s[pod.name] = now_s + self._export_s
                self._export_pod(pod, now_s)
        if self._queue_due_s <= now_s:
            self._queue_due_s = now_s + self._export_s
            self._export_queue(now_s)
            self._export_latencies(now_s)

    def observation(self, now_s: float) -> PoolObservation:
        """Return the pool as the operator observes it now."""
        return PoolObservation(now_s, len(self._pods.live), self._pods.observed(now_s), self._queue, self._latencies())

    def _export_pod(self, pod: Pod, now_s: float) -> None:
        state, last, before = self._fleet.engine(pod.engine), pod.last, pod.sample
        prompt_rate = generated_rate = None
        if last is not None and before is not None:
            span = now_s - before.time_s
            prompt_rate = (state.prompt_tokens - last.prompt_tokens) / span
            generated_rate = (state.generated_tokens - last.generated_tokens) / span
        pod.last = state
        pod.sample = PodSample(
            now_s,
            state.kv_used_blocks / self._fleet.profile.kv_blocks,
            state.running,
            state.waiting,
            prompt_rate,
            generated_rate,
            pod.ready_s - pod.created_s,
        )

    def _export_queue(self, now_s: float) -> None:
        state = self._fleet.queue()
        self._claimed.append((now_s, state.claimed_tokens))
        while len(self._claimed) > 2 and now_s - self._claimed[1][0] >= DRAIN_WINDOW_S:
            self._claimed.popleft()
        begun_s, begun = self._claimed[0]
        rate = (state.claimed_tokens - begun) / (now_s - begun_s) if now_s > begun_s else None
        age_s = 0.0 if math.isinf(state.oldest_s) else now_s - state.oldest_s
        self._queue = QueueSample(
            now_s, state.depth, state.tokens, age_s, state.running, rate, output_tokens=state.expected_output
        )

    def _export_latencies(self, now_s: float) -> None:
        fresh = self._fleet.first_tokens(self._num_firsts)
        self._num_firsts += len(fresh)
        ttft = self._fleet.first_s[fresh] - self._load.arrival_s[fresh]
        self._counts = self._counts + np.bincount(np.searchsorted(TTFT_BOUNDS_S, ttft), minlength=len(self._counts))
        self._windows.append((now_s, self._counts))
        while len(self._windows) > 2 and now_s - self._windows[1][0] >= TTFT_WINDOW_S:
            self._windows.popleft()

    def _latencies(self) -> LatencyWindow | None:
        if len(self._windows) < 2:
            return None
        (begun_s, begun), (now_s, now) = self._windows[0], self._windows[-1]
        return LatencyWindow(TTFT_BOUNDS_S, tuple((now - begun).tolist()), now_s - begun_s)
