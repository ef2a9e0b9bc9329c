"""The engine's own scheduler and cache on virtual time: a step takes what a function of it says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.config import SchedulerConfig
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import TokenSequence
from pagestream_engine.scheduler.policy_registry import make_policy
from pagestream_engine.scheduler.scheduled_step import ScheduledStep
from pagestream_engine.scheduler.scheduler import Scheduler

Floats = npt.NDArray[np.float64]

_PARAMS = SamplingParams(temperature=0, max_tokens=None)


class VirtualRequest(NamedTuple):
    """A request whose prompt has nothing in common with others, and whose answer has a known length."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    """After so many its model ends it; no policy knows that before."""
    priority: int = 0
    tenant: str = ""


class VirtualEngine:
    """Serves requests in steps of the real scheduler, each of which answers every sample with a token.

    A request is added before the first step that begins after its arrival. With `num_ahead` a step is scheduled while
    the one before it runs, as by `StepPipeline`.

    Args:
        config: of the scheduler.
        cache: empty; its pool can hold each request alone.
        step_seconds: returns what a step takes; called when the step is scheduled, before it is sent.
        num_ahead: steps that are scheduled before the one that runs has ended, 0 or 1.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        step_seconds: Callable[[ScheduledStep], float],
        *,
        num_ahead: int = 0,
    ) -> None:
        self.cache = cache
        self.scheduler = Scheduler(config, cache, make_policy(config.scheduling_policy))
        self.now_s = 0.0
        self.first_s: Floats = np.zeros(0)
        """When each request's first token came; infinity before."""
        self.end_s: Floats = np.zeros(0)
        """When each request's last token came; infinity before."""
        self._step_seconds = step_seconds
        self._num_ahead = num_ahead
        self._coming: deque[tuple[int, VirtualRequest]] = deque()
        self._ends_at: dict[TokenSequence, int] = {}
        """Of each request that was added and has not ended: the tokens of its prompt and its answer."""
        self._in_flight: deque[tuple[ScheduledStep, float]] = deque()
        self._max_tokens = cache.layout.max_tokens(cache.pool.num_blocks, 1 << 31)

    def run(self, requests: Iterable[VirtualRequest], on_step: Callable[[float], None] | None = None) -> None:
        """Serve all requests to their ends.

        Args:
            requests: in the order of their arrival.
            on_step: called with the seconds of each step when it ends, before its tokens are taken.
        """
        self._coming.extend(enumerate(requests))
        self.first_s, self.end_s = np.full((2, len(self._coming)), np.inf)
        while self._coming or self._ends_at:
            self._add_arrived()
            launched = self._launch()
            if self._in_flight and (len(self._in_flight) > self._num_ahead or not launched):
                self._collect(on_step)
            elif not launched:
                self.now_s = self._coming[0][1].arrival_s
        while self._in_flight:  # computes tokens after the last ends
            self._collect(on_step)

    def _add_arrived(self) -> None:
        while self._coming and self._coming[0][1].arrival_s <= self.now_s:
            number, request = self._coming.popleft()
            seq = TokenSequence(
                str(number),
                [number + 1] + [0] * (request.prompt_tokens - 1),
                _PARAMS,
                seed=0,
                arrival=number,
                max_total_tokens=self._max_tokens,
                priority=request.priority,
                tenant=request.tenant,
            )
            self._ends_at[seq] = request.prompt_tokens + request.output_tokens
            self.scheduler.add(seq)

    def _launch(self) -> bool:
        step = self.scheduler.schedule()
        if step.is_empty:
            return False
        self._in_flight.append((step, self._step_seconds(step)))
        self.scheduler.update_after_schedule(step)
        return True

    def _collect(self, on_step: Callable[[float], None] | None) -> None:
        step, seconds = self._in_flight.popleft()
        self.now_s += seconds
        if on_step is not None:
            on_step(seconds)
        sampled = step.sampled()
        self.scheduler.update_from_output(step, [(0,)] * len(sampled))
        self.scheduler.prefill_budget.note(step, seconds)
        for chunk in step.prefills:
            if chunk.needs_sample and chunk.seq in self._ends_at:
                number = chunk.seq.arrival
                self.first_s[number] = min(self.first_s[number], self.now_s)
        ended = [seq for seq in sampled if len(seq.token_ids) >= self._ends_at.get(seq, self._max_tokens + 1)]
        for seq in ended:
            self.end_s[seq.arrival] = self.now_s
            del self._ends_at[seq]
        self.scheduler.finish_requests(ended)
