"""Steps of 32 decodes and a chunk of a long prompt, as they were measured (docs/benchmarks/itl-bound.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from pagestream_engine import SchedulerConfig
from pagestream_engine.kv_cache import BlockPool, CacheManager
from pagestream_engine.plan import ScheduledStep, full_attention
from pagestream_simulator import VirtualEngine, VirtualRequest

NUM_STREAMS = 32
STREAM_PROMPT_TOKENS = 64
PROMPT_TOKENS = 8000
DECODES_S = 0.051
CONTEXTS = (0, 2000, 4000, 6000, 8000)
CHUNKS = (1, 8, 16, 32, 64)
CHUNKS_MS = np.array(
    [[1, 2, 13, 24, 68], [1, 10, 28, 63, 136], [4, 25, 43, 83, 183], [13, 43, 67, 125, 252], [16, 57, 81, 151, 382]]
)
"""Of a chunk beside the decodes, by context and size. The costs are linear in neither."""


def _factor_one() -> float:
    return 1.0


@dataclass
class MeasuredMachine:
    """Takes for each step what was measured, and keeps the times of those with decodes.

    Args:
        decode_context_s: seconds for each token that a stream has generated.
        noise: draws a factor of a step's time.
    """

    decode_context_s: float = 0.0
    noise: Callable[[], float] = _factor_one
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    """Context of the chunk, or -1; seconds of the decodes alone, without noise; and of the step."""

    def step_s(self, step: ScheduledStep) -> float:
        """Return what a step takes."""
        if not step.decodes:
            return DECODES_S
        generated = sum(entry.seq.num_sent_tokens - STREAM_PROMPT_TOKENS for entry in step.decodes)
        decodes_s = DECODES_S + self.decode_context_s * generated
        chunks = [(chunk.seq.num_sent_tokens, chunk.num_scheduled_tokens) for chunk in step.prefills]
        seconds = (decodes_s + sum(chunk_s(*chunk) for chunk in chunks)) * self.noise()
        self.steps.append((chunks[0][0] if chunks else -1, decodes_s, seconds))
        return seconds

    def arrivals(self) -> Iterator[list[tuple[int, float, float]]]:
        """Yield the steps of each long prompt, those without a chunk in between included."""
        begins = [place for place, (context, *_) in enumerate(self.steps) if context == 0]
        for begin, end in zip(begins, [*begins[1:], len(self.steps)], strict=True):
            last = max(place for place in range(begin, end) if self.steps[place][0] >= 0)
            yield self.steps[begin : last + 1]


def chunk_s(context: int, size: int) -> float:
    """Return the seconds of a chunk of so many tokens after so many others, between and beyond what was measured."""
    by_size = [np.interp(context, CONTEXTS, column) for column in CHUNKS_MS.T]
    beyond = max(0, size - CHUNKS[-1]) * (by_size[-1] - by_size[-2]) / (CHUNKS[-1] - CHUNKS[-2])
    return float(np.interp(size, CHUNKS, by_size) + beyond) / 1e3


def run_beside_streams(machine: MeasuredMachine, bound_s: float, arrivals_s: list[float], num_ahead: int = 0) -> None:
    """Let long prompts come to an engine whose streams decode until all of them have their first token."""
    config = SchedulerConfig(max_num_seqs=NUM_STREAMS + 1, itl_bound_ms=1e3 * bound_s)
    cache = CacheManager(BlockPool(16384), full_attention(16), enable_prefix_caching=False)
    engine = VirtualEngine(config, cache, machine.step_s, num_ahead=num_ahead)
    num_tokens = round((arrivals_s[-1] + 150.0) / DECODES_S)
    streams = [VirtualRequest(0.0, STREAM_PROMPT_TOKENS, num_tokens) for _ in range(NUM_STREAMS)]
    engine.run([*streams, *(VirtualRequest(at_s, PROMPT_TOKENS, 1) for at_s in arrivals_s)])
