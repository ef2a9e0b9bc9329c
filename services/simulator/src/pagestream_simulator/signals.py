"""What reaches a law: each engine's and gateway's report, as old as it would be."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from pagestream_scaling import LatencyWindow, PodSample, PoolObservation, QueueSample

from pagestream_simulator.fleet.fleet import Fleet
from pagestream_simulator.fleet.pods import Pod, Pods
from pagestream_simulator.load import Load

TTFT_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The buckets that the GenAI conventions recommend for gen_ai.server.time_to_first_token."""
TTFT_SPAN_S = 60.0
DRAIN_WINDOW_S = 10.0
"""As the queue's setting drain_window_ms."""


class Signals:
    """Reports, every `export_s` from each part; engines in turn, half of them in each second of two."""

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

    def report(self, now_s: float) -> None:
        """Have everybody report whose time has come."""
        for pod in self._pods.live:
            if pod.ready_s <= now_s and self._pod_due_s.get(pod.name, pod.ready_s) <= now_s:
                self._pod_due_s[pod.name] = now_s + self._export_s
                self._report_pod(pod, now_s)
        if self._queue_due_s <= now_s:
            self._queue_due_s = now_s + self._export_s
            self._report_queue(now_s)
            self._report_latencies(now_s)

    def observation(self, now_s: float) -> PoolObservation:
        """The pool as its operator sees it now."""
        return PoolObservation(now_s, len(self._pods.live), self._pods.observed(now_s), self._queue, self._latencies())

    def _report_pod(self, pod: Pod, now_s: float) -> None:
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

    def _report_queue(self, now_s: float) -> None:
        state = self._fleet.queue()
        self._claimed.append((now_s, state.claimed_tokens))
        while len(self._claimed) > 2 and now_s - self._claimed[1][0] >= DRAIN_WINDOW_S:
            self._claimed.popleft()
        begun_s, begun = self._claimed[0]
        rate = (state.claimed_tokens - begun) / (now_s - begun_s) if now_s > begun_s else None
        age_s = 0.0 if math.isinf(state.oldest_s) else now_s - state.oldest_s
        self._queue = QueueSample(now_s, state.depth, state.tokens, age_s, state.running, rate)

    def _report_latencies(self, now_s: float) -> None:
        fresh = self._fleet.firsts(self._num_firsts)
        self._num_firsts += len(fresh)
        ttft = self._fleet.first_s[fresh] - self._load.arrival_s[fresh]
        self._counts = self._counts + np.bincount(np.searchsorted(TTFT_BOUNDS_S, ttft), minlength=len(self._counts))
        self._windows.append((now_s, self._counts))
        while len(self._windows) > 2 and now_s - self._windows[1][0] >= TTFT_SPAN_S:
            self._windows.popleft()

    def _latencies(self) -> LatencyWindow | None:
        if len(self._windows) < 2:
            return None
        (begun_s, begun), (now_s, now) = self._windows[0], self._windows[-1]
        return LatencyWindow(TTFT_BOUNDS_S, tuple((now - begun).tolist()), now_s - begun_s)
