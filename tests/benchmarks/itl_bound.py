"""Inter-token latency of running streams while a long prompt arrives, with and without `itl_bound_ms`.

32 streams of the reference model (engine_throughput.py, its context raised) decode; then a prompt of 8,000 tokens
comes. The streams' own prompts are as long as those of the Azure conversation trace in the mean, 1,155 tokens, or as
`--stream-tokens` says: with 64 they more than triple their length while the long prompt is computed. The bound is
twice a step of decodes alone, measured in the same run. Times are taken at each step's outputs: what a client of a
stream would wait for. Rounds with the bound and without alternate, and each has streams anew, since decodes take
longer the longer the streams are; steps of decodes alone are measured before and after each arrival. Each interval is
also taken in bounds of its own time: twice a step of decodes alone, between its median before the prompt and after it.
With `--processor-time` one thread computes, and its processor time stands for time everywhere, in the engine, too: for
a machine with other load.

    PYTHONPATH=tests python tests/benchmarks/itl_bound.py [--short] [--rounds 3] [--stream-tokens 64] [--processor-time]
    PYTHONPATH=tests python tests/benchmarks/itl_bound.py --by-chunk --processor-time: a step by chunk and context
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Self

import torch
from engine_throughput import DTYPES, SHAPE
from goals import print_goal

NUM_STREAMS = 32
NUM_WARM_UP_STEPS = 20
BOUND_STEPS = 2.0
"""The bound in steps of decodes alone."""
GOAL = 1.5
"""Most that the 99th percentile may be, in bounds."""
LONG = "long"


@dataclass
class Clock:
    """What seconds are taken from."""

    now: Callable[[], float] = time.perf_counter


CLOCK = Clock()


@dataclass(frozen=True)
class Times:
    """Of steps."""

    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: list[float]) -> Self:
        """Return those of steps that took so long."""
        cuts = quantiles(seconds, n=100, method="inclusive")
        return cls(cuts[49] * 1e3, cuts[98] * 1e3, max(seconds) * 1e3)

    def __str__(self) -> str:
        return f"p50 {self.p50_ms:.1f}, p99 {self.p99_ms:.1f}, max {self.max_ms:.1f} ms"


@dataclass(frozen=True)
class Round:
    """One arrival of the long prompt."""

    intervals: list[float]
    ttft_s: float

    @property
    def itl(self) -> Times:
        """Of the streams' tokens."""
        return Times.of(self.intervals)

    def p99_in_bounds(self, before_ms: float, after_ms: float) -> float:
        """Return the p99 of the intervals, each in `BOUND_STEPS` steps of decodes alone at its own time."""
        last = max(len(self.intervals) - 1, 1)
        steps_ms = (before_ms + (after_ms - before_ms) * number / last for number in range(len(self.intervals)))
        shares = [
            seconds * 1e3 / (BOUND_STEPS * step_ms) for seconds, step_ms in zip(self.intervals, steps_ms, strict=True)
        ]
        return quantiles(shares, n=100, method="inclusive")[98]


def make_model(folder: Path, dtype: str, max_position_embeddings: int) -> Path:
    """Write the reference model with a longer context."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, "max_position_embeddings": max_position_embeddings})
    LlamaForCausalLM._from_config(config, dtype=DTYPES[dtype]).save_pretrained(folder)
    return folder


def make_engine(folder: Path, bound_ms: float | None) -> Any:
    """Load an engine with room for all."""
    from pagestream_engine import Engine, EngineConfig

    options = {"max_num_seqs": NUM_STREAMS + 1, "enable_prefix_caching": False, "itl_bound_ms": bound_ms}
    return Engine(folder, EngineConfig.from_options(options))


def start_streams(engine: Any, num_tokens: int) -> None:
    """End the streams of an earlier round, and bring new ones with prompts of `num_tokens` to where they decode.

    Their prompts have no bound: under it the first streams would have grown long before the last one has begun.
    """
    from pagestream_engine import SamplingParams

    for number in range(NUM_STREAMS):
        engine.abort_request(str(number))
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for number in range(NUM_STREAMS):
        engine.add_request(str(number), [3 + number] * num_tokens, params)
    scheduler = engine._scheduler
    bounded, learners = scheduler.prefill_budget, scheduler.learners
    scheduler.prefill_budget = FixedChunks(engine.config.scheduler.max_num_batched_tokens)
    scheduler.learners = []
    begun: set[str] = set()
    while len(begun) < NUM_STREAMS:
        begun.update(output.seq_id for output in engine.step() if output.token_id is not None)
    scheduler.prefill_budget, scheduler.learners = bounded, learners
    for _ in range(NUM_WARM_UP_STEPS):
        engine.step()


def decode_steps(engine: Any, count: int = 100) -> Times:
    """Return the times of steps of decodes alone."""
    seconds = []
    for _ in range(count):
        started = CLOCK.now()
        engine.step()
        seconds.append(CLOCK.now() - started)
    return Times.of(seconds)


def arrival(engine: Any, num_tokens: int) -> Round:
    """Let a long prompt come, and take the times between the streams' tokens until its first token."""
    from pagestream_engine import SamplingParams

    prompt = [5 + number % 1000 for number in range(num_tokens)]
    intervals = []
    started = last = CLOCK.now()
    engine.add_request(LONG, prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    is_done = False
    while not is_done:
        outputs = engine.step()
        now = CLOCK.now()
        is_done = any(output.seq_id == LONG for output in outputs)
        if any(output.seq_id != LONG for output in outputs):
            intervals.append(now - last)
            last = now
    return Round(intervals, CLOCK.now() - started)


class FixedChunks:
    """Takes the place of the engine's PrefillBudget."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def begin(self, _num_decodes: int, num_tokens: int) -> Any:
        """Return a budget of `num_tokens` tokens."""
        from pagestream_engine.scheduler.admission import ChunkBudget

        return ChunkBudget(min(num_tokens, self.num_tokens))


def print_by_chunk(engine: Any, num_tokens: int) -> None:
    """Print the least of five steps beside the streams, in ms, by a chunk's size and the tokens before it."""
    from pagestream_engine import SamplingParams

    chunks = engine._scheduler.prefill_budget = FixedChunks(512)
    prompt = [5 + number % 1000 for number in range(num_tokens + 1024)]
    engine.add_request(LONG, prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    sizes = (0, 1, 8, 16, 32, 64)
    print("context |", " | ".join(f"{size:>5}" for size in sizes))
    num_computed = 0
    for context in range(0, num_tokens + 1, num_tokens // 4):
        while num_computed < context:
            chunks.num_tokens = min(512, context - num_computed)
            engine.step()
            num_computed += chunks.num_tokens
        row = []
        for chunks.num_tokens in sizes:
            times = []
            for _ in range(5 if chunks.num_tokens < 64 else 2):
                started = CLOCK.now()
                engine.step()
                times.append((CLOCK.now() - started) * 1e3)
                num_computed += chunks.num_tokens
            row.append(f"{min(times):5.1f}")
        print(f"{context:>7} |", " | ".join(row), flush=True)


def use_processor_time() -> None:
    """Let this benchmark and the engine measure the processor time of the thread that steps."""
    from pagestream_engine import stats

    CLOCK.now = stats.perf_counter = time.thread_time


def main() -> None:
    """Print both, and the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a prompt of 1,000 tokens; its figures mean nothing")
    parser.add_argument("--tokens", type=int, default=8000, help="of the long prompt")
    parser.add_argument("--stream-tokens", type=int, default=1155, help="of each stream's own prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch")
    parser.add_argument("--processor-time", action="store_true", help="of one thread, in place of time")
    parser.add_argument("--by-chunk", action="store_true", help="print what steps take, in place of the bound")
    options = parser.parse_args()
    if options.processor_time:
        use_processor_time()
    torch.set_num_threads(1 if options.processor_time else options.threads)
    num_tokens, rounds = (1000, 1) if options.short else (options.tokens, options.rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "model", options.dtype, 2 * num_tokens + 4096)
        free = make_engine(folder, None)
        start_streams(free, options.stream_tokens)
        if options.by_chunk:
            print_by_chunk(free, num_tokens)
            return
        decode_ms = decode_steps(free).p50_ms
        bound_ms = BOUND_STEPS * decode_ms
        bounded = make_engine(folder, bound_ms)
        print(f"{NUM_STREAMS} streams, a step of decodes alone {decode_ms:.1f} ms, the bound {bound_ms:.1f} ms")
        shares, shares_of_time = [], []
        for _ in range(rounds):
            for what, engine in (("without", free), ("with", bounded)):
                start_streams(engine, options.stream_tokens)
                before = decode_steps(engine)
                found = arrival(engine, num_tokens)
                after = decode_steps(engine)
                print(f"{what:>7} the bound: ITL {found.itl}; TTFT of {num_tokens} tokens {found.ttft_s:.2f} s")
                print(f"    decodes alone before: {before}; after: {after}", flush=True)
            shares.append(found.itl.p99_ms / bound_ms)
            shares_of_time.append(found.p99_in_bounds(before.p50_ms, after.p50_ms))
    arrives = f"p99 of ITL while {num_tokens} tokens arrive"
    print_goal(arrives, f"{GOAL} bounds", f"{median(shares):.2f} bounds")
    print_goal(f"{arrives}, by decodes of its time", f"{GOAL} bounds", f"{median(shares_of_time):.2f} bounds")


if __name__ == "__main__":
    main()
