"""The metrics that a law observes: each engine's and gateway's last export, as old as it would be."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from pagestream_scaling import LatencyWindow, PodSample, PoolObservation, QueueSample, TtftPolicy
from pagestream_streams.settings import StreamsSettings
from pagestream_telemetry.catalog import TIME_TO_FIRST_TOKEN

from pagestream_simulator.fleet.fleet import Fleet
from pagestream_simulator.fleet.pods import Pod, Pods
from pagestream_simulator.traces.load import Load

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
