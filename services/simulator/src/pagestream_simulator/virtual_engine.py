"""One engine on virtual time: the engine's own scheduler and cache; a function of its contents times a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pagestream_engine.config import SchedulerConfig
from pagestream_engine.kv_cache.manager import CacheManager
from pagestream_engine.plan import ScheduledStep
from pagestream_engine.request import Request, Sequence
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.scheduler.policies import make_policy
from pagestream_engine.scheduler.scheduler import Scheduler

from pagestream_simulator.profile import StepCost

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


class Collected(NamedTuple):
    """A step that has ended."""

    step: ScheduledStep
    sampled: list[Sequence]
    """Those that it has sampled a token for; `arrival` is the request's number."""
    ended: list[Sequence]
    """Those of them that got their last token."""


class VirtualEngine:
    """Serves requests in steps of the real scheduler, each of which answers every sample with a token.

    A request is added before the first step that begins after its arrival. With `num_ahead` a step is scheduled while
    the one before it runs, as by `StepPipeline`.

    Args:
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
        self._ends_at: dict[Sequence, int] = {}
        """Of each request that was added and has not ended: the tokens of its prompt and its answer."""
        self._in_flight: deque[tuple[ScheduledStep, float]] = deque()
        self._max_tokens = cache.layout.max_tokens(cache.pool.num_blocks, 1 << 31)

    def run(self, requests: Iterable[VirtualRequest], on_step: Callable[[float], None] | None = None) -> None:
        """Serve all requests to their ends.

        Args:
            requests: in the order of their arrival.
            on_step: called with the seconds of each step when it ends, before its tokens are taken.
        """
        coming = deque(enumerate(requests))
        self.first_s, self.end_s = np.full((2, len(coming)), np.inf)
        while coming or self._ends_at:
            while coming and coming[0][1].arrival_s <= self.now_s:
                self.add(*coming.popleft())
            launched = self.launch() is not None
            if self._in_flight and (len(self._in_flight) > self._num_ahead or not launched):
                self._note_times(self.collect(on_step))
            elif not launched:
                self.now_s = coming[0][1].arrival_s
        while self._in_flight:  # computes tokens after the last ends
            self._note_times(self.collect(on_step))

    def _note_times(self, collected: Collected) -> None:
        for chunk in collected.step.prefills:
            if chunk.needs_sample:
                number = chunk.seq.arrival
                self.first_s[number] = min(self.first_s[number], self.now_s)
        for seq in collected.ended:
            self.end_s[seq.arrival] = self.now_s

    # -- step by step, for those who keep the clock of several engines --

    def add(self, number: int, request: VirtualRequest) -> None:
        """Queue a request under a number that no other has; prompts with different numbers have nothing in common."""
        seq = Sequence(
            str(number),
            [number + 1] + [0] * (request.prompt_tokens - 1),
            _PARAMS,
            seed=0,
            arrival=number,
            max_total_tokens=self._max_tokens,
            request=Request((), (), priority=request.priority, tenant=request.tenant),
        )
        self._ends_at[seq] = request.prompt_tokens + request.output_tokens
        self.scheduler.add(seq)

    def launch(self) -> float | None:
        """Schedule a step and send it; return the seconds that it takes, or None where nothing can run."""
        step = self.scheduler.schedule()
        if step.is_empty:
            return None
        seconds = self._step_seconds(step)
        self._in_flight.append((step, seconds))
        self.scheduler.update_after_schedule(step)
        return seconds

    def collect(self, on_step: Callable[[float], None] | None = None) -> Collected:
        """Go on to the end of the oldest step in flight, and take its tokens."""
        step, seconds = self._in_flight.popleft()
        self.now_s += seconds
        if on_step is not None:
            on_step(seconds)
        sampled = step.sampled()
        self.scheduler.update_from_output(step, [(0,)] * len(sampled))
        if self.scheduler.prefill_budget is not None:
            self.scheduler.prefill_budget.note(step, seconds)
        ended = [seq for seq in sampled if len(seq.token_ids) >= self._ends_at.get(seq, self._max_tokens + 1)]
        for seq in ended:
            del self._ends_at[seq]
        self.scheduler.finish_requests(ended)
        return Collected(step, sampled, ended)


class StepContents(NamedTuple):
    """The contents that `StepCost` has costs for, in the order of its fields, without the step itself."""

    prefill_tokens: int
    prefill_pairs: int
    """Pairs of a chunk's token and a token that it attends to."""
    decodes: int
    decode_context: int
    """Tokens that decoding sequences attend to."""

    @classmethod
    def of(cls, step: ScheduledStep) -> Self:
        """Return the contents of a step that is scheduled and not sent."""
        tokens = pairs = 0
        for chunk in step.prefills:
            new = chunk.num_scheduled_tokens
            tokens += new
            pairs += new * chunk.seq.num_sent_tokens + new * (new + 1) // 2
        # `num_sent_tokens` is inlined: this runs for every decode in every step.
        context = sum([e.seq.num_computed_tokens + e.seq.num_in_flight_tokens for e in step.decodes])
        return cls(tokens, pairs, len(step.decodes), context + len(step.decodes))

    def seconds(self, cost: StepCost) -> float:
        """Return what a step of these contents takes."""
        return (
            cost.fixed_s
            + self.prefill_tokens * cost.prefill_token_s
            + self.prefill_pairs * cost.prefill_pair_s
            + self.decodes * cost.decode_s
            + self.decode_context * cost.decode_context_s
        )
