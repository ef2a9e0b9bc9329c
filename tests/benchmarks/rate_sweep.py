"""The request rate that each system sustains at equal normalised latency, on conversations of the Azure trace.

Three systems with one random model, on one machine, one after the other: our `Engine`; `transformers` with static
batches (a batch takes what waits and runs until its longest output is done); `transformers` with its own continuous
batching. Prompt and output lengths are those of the trace, divided by `--scale`; requests arrive by a Poisson process
(seed 0, the same for all systems), greedy, end-of-sequence ignored. Normalised latency is the mean over requests of
(end - arrival) / output tokens, as in the paper of PagedAttention (SOSP 2023, figure 12).

Each system is first given all requests at once: its capacity. Then it runs at shares of that. The sustained rate is
where the curve through these points crosses the limit, by linear interpolation; "at least" the last rate that was tried
where it doesn't.

With `--processor-time` and one thread, seconds are of the processor that this process uses, and idle ones are skipped:
for a machine that other load slows down by turns.

    PYTHONPATH=tests python tests/benchmarks/rate_sweep.py [--short] [--trace FILE] [--limits 0.1 0.2] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from engine_throughput import DTYPES, SHAPE, generate_static, make_model
from goals import print_goal
from pagestream_simulator.load import SAMPLE, read_trace

PEER_RATIO = 2.0
"""What is wanted against the better peer; the paper reports 2 to 4 against systems of its time."""
MAX_NUM_SEQS = 64
STATIC_BATCH_SIZES = (8, 16, 32)
IDLE_S = 0.0005
LIMIT_S = 900.0
"""Of one run."""


@dataclass(frozen=True, slots=True)
class Request:
    """One conversation turn."""

    prompt: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Point:
    """What one system gave at one rate."""

    requests_per_s: float
    normalised_latency_s: float
    """Mean seconds for each output token, waiting included."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What one system gave."""

    system: str
    capacity: float
    """Requests a second where all are there from the beginning."""
    points: list[Point]

    def sustained(self, limit_s: float) -> tuple[float, bool]:
        """Return the rate at a normalised latency, and whether the curve reaches the limit at all."""
        before = Point(0.0, 0.0)
        for point in self.points:
            if point.normalised_latency_s > limit_s:
                if before.requests_per_s == 0.0:
                    return 0.0, True  # too slow at the lowest rate that was tried
                share = (limit_s - before.normalised_latency_s) / (
                    point.normalised_latency_s - before.normalised_latency_s
                )
                return before.requests_per_s + share * (point.requests_per_s - before.requests_per_s), True
            before = point
        return before.requests_per_s, False


class Arrivals:
    """Requests that arrive at given seconds after the start."""

    def __init__(self, requests: Sequence[Request], seconds: Sequence[float], *, by_processor: bool) -> None:
        """`by_processor` counts the processor's seconds in place of the wall clock's."""
        self._requests = requests
        self._seconds = seconds
        self._next = 0
        self._by_processor = by_processor
        self._clock = time.process_time if by_processor else time.perf_counter
        self._started = self._clock()
        self._skipped = 0.0

    @property
    def left(self) -> bool:
        """Whether more requests come."""
        return self._next < len(self._requests)

    def due(self) -> Iterator[int]:
        """Yield the numbers of the requests that have arrived and were not yielded."""
        while self.left and self._seconds[self._next] <= self.now():
            self._next += 1
            yield self._next - 1

    def now(self) -> float:
        """Return the seconds since the start."""
        seconds = self._clock() - self._started + self._skipped
        if seconds > LIMIT_S:
            raise TimeoutError(f"a run took more than {LIMIT_S:.0f} s")
        return seconds

    def wait(self) -> None:
        """Wait while nothing is to be done before the next request arrives."""
        if not self._by_processor:
            time.sleep(IDLE_S)
        elif self.left:
            self._skipped += max(0.0, self._seconds[self._next] - self.now())


class System(ABC):
    """Serves requests as they arrive."""

    name: str
    by_processor = False
    """Whether seconds are of the processor: see `Arrivals`."""

    @abstractmethod
    def serve(self, requests: Sequence[Request], seconds: Sequence[float]) -> list[float]:
        """Serve requests that arrive at these seconds. Return the second at which each one's last token was there."""

    def capacity(self, requests: Sequence[Request]) -> float:
        """Return the requests a second where all of them wait at the start."""
        return len(requests) / max(self.serve(requests, [0.0] * len(requests)))


class Pagestream(System):
    """Our engine, stepped by this thread."""

    name = "pagestream"

    def __init__(self, folder: Path, dtype: str) -> None:
        from pagestream_engine import Engine, EngineConfig

        config = {"max_num_seqs": MAX_NUM_SEQS, "enable_prefix_caching": False, "dtype": dtype}
        self._engine = Engine(folder, EngineConfig.from_options(config))

    def serve(self, requests: Sequence[Request], seconds: Sequence[float]) -> list[float]:
        from pagestream_engine import SamplingParams

        engine, ends = self._engine, [0.0] * len(requests)
        arrivals = Arrivals(requests, seconds, by_processor=self.by_processor)
        num_left = len(requests)
        while num_left:
            for number in arrivals.due():
                count = requests[number].num_output_tokens
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                engine.add_request(str(number), requests[number].prompt, params)
            if not engine.has_unfinished_requests():
                arrivals.wait()
                continue
            for output in engine.step():
                if output.finish_reason is not None:
                    if output.finish_reason != "length":
                        raise RuntimeError(f"request {output.seq_id} ended by {output.finish_reason}")
                    ends[int(output.seq_id)] = arrivals.now()
                    num_left -= 1
        return ends

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


class Static(System):
    """`generate` over left-padded batches: it takes what waits, and all of a batch end with its longest output."""

    def __init__(self, folder: Path, dtype: str, batch_size: int) -> None:
        from transformers import LlamaForCausalLM

        self.name = f"transformers, static batches of {batch_size}"
        self._batch_size = batch_size
        self._model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
        self._model.generation_config.eos_token_id = None

    def serve(self, requests: Sequence[Request], seconds: Sequence[float]) -> list[float]:
        arrivals = Arrivals(requests, seconds, by_processor=self.by_processor)
        ends, waiting = [0.0] * len(requests), list[int]()
        while arrivals.left or waiting:
            waiting += arrivals.due()
            if not waiting:
                arrivals.wait()
                continue
            batch, waiting = waiting[: self._batch_size], waiting[self._batch_size :]
            self._generate([requests[number] for number in batch])
            for number in batch:
                ends[number] = arrivals.now()
        return ends

    def _generate(self, batch: Sequence[Request]) -> None:
        count = max(each.num_output_tokens for each in batch)
        found = generate_static(self._model, [each.prompt for each in batch], count).shape[1]
        if found != count:
            raise RuntimeError(f"expected {count} new tokens, got {found}")


class Continuous(System):
    """The continuous batching of `transformers`: its own thread, paged cache and FIFO scheduler."""

    name = "transformers, continuous batching"

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

        self._model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="sdpa")
        self._model.eval()
        self._generation = GenerationConfig(do_sample=False, eos_token_id=-1)
        self._config = ContinuousBatchingConfig(
            page_size=32,
            num_blocks=MAX_NUM_SEQS * SHAPE["max_position_embeddings"] // 32 // 2,
            max_batch_tokens=512,
            max_requests_per_batch=MAX_NUM_SEQS,
            allow_block_sharing=False,
        )

    def serve(self, requests: Sequence[Request], seconds: Sequence[float]) -> list[float]:
        with self._model.continuous_batching_context_manager(
            generation_config=self._generation, continuous_batching_config=self._config, timeout=10
        ) as manager:
            ends, num_left, num_running = [0.0] * len(requests), len(requests), 0
            arrivals = Arrivals(requests, seconds, by_processor=self.by_processor)
            while num_left:
                if not num_running:
                    arrivals.wait()
                for number in arrivals.due():
                    num_running += 1
                    manager.add_request(
                        requests[number].prompt,
                        request_id=str(number),
                        max_new_tokens=requests[number].num_output_tokens,
                    )
                result = manager.get_result(timeout=0.002)
                arrivals.now()  # a run has a limit
                if result is not None and result.is_finished():
                    if len(result.generated_tokens) != requests[int(result.request_id)].num_output_tokens:
                        raise RuntimeError(f"request {result.request_id}: {result.error or 'too few tokens'}")
                    ends[int(result.request_id)] = arrivals.now()
                    num_left, num_running = num_left - 1, num_running - 1
        return ends


def conversations(trace: str, count: int, scale: int) -> list[Request]:
    """Return the trace's first requests that fit the model, with random tokens."""
    generator, requests = random.Random(0), list[Request]()
    for row in read_trace(trace):
        num_prompt, num_output = max(1, row.input_tokens // scale), max(1, row.output_tokens // scale)
        if num_prompt + num_output <= SHAPE["max_position_embeddings"]:
            prompt = [generator.randrange(3, SHAPE["vocab_size"]) for _ in range(num_prompt)]
            requests.append(Request(prompt, num_output))
        if len(requests) == count:
            return requests
    raise ValueError(f"{trace}: expected at least {count} requests that fit, found {len(requests)}")


def poisson(count: int, rate: float) -> list[float]:
    """Return the seconds of `count` arrivals at a mean rate; for another rate the same ones, stretched."""
    generator, seconds, at = random.Random(0), list[float](), 0.0
    for _ in range(count):
        at += generator.expovariate(1.0) / rate
        seconds.append(at)
    return seconds


def measure(system: System, requests: Sequence[Request], shares: Sequence[float], *, by_processor: bool) -> Curve:
    """Run a system at shares of its own capacity."""
    system.by_processor = by_processor
    system.capacity(requests[: len(requests) // 4])  # warms it up
    capacity = system.capacity(requests)
    print(f"{system.name}: capacity {capacity:.2f} requests/s", flush=True)
    points = []
    for share in shares:
        rate = share * capacity
        seconds = poisson(len(requests), rate)
        ends = system.serve(requests, seconds)
        latencies = [(end - at) / each.num_output_tokens for end, at, each in zip(ends, seconds, requests, strict=True)]
        points.append(Point(rate, fmean(latencies)))
        print(f"  {rate:6.2f} requests/s: {points[-1].normalised_latency_s * 1e3:8.1f} ms/token", flush=True)
    return Curve(system.name, capacity, points)


def curves(options: argparse.Namespace, folder: Path) -> Iterator[Curve]:
    """Measure all systems; of the static batch sizes the one with the highest capacity."""
    count, shares = (12, (0.5,)) if options.short else (options.requests, options.shares)
    by_processor = options.processor_time
    requests = conversations(options.trace, count, options.scale)
    ours = Pagestream(folder, options.dtype)
    yield measure(ours, requests, shares, by_processor=by_processor)
    ours.close()
    del ours
    gc.collect()
    sizes = STATIC_BATCH_SIZES[:1] if options.short else STATIC_BATCH_SIZES
    systems = [Static(folder, options.dtype, size) for size in sizes]
    for each in systems:
        each.by_processor = by_processor
    best = max(systems, key=lambda system: system.capacity(requests))
    yield measure(best, requests, shares, by_processor=by_processor)
    del systems, best
    gc.collect()
    yield measure(Continuous(folder, options.dtype), requests, shares, by_processor=by_processor)


def main() -> None:
    """Print the curves and the sustained rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one rate and few requests; its figures mean nothing")
    parser.add_argument("--trace", default=SAMPLE, help="a trace's file (default: this project's sample)")
    parser.add_argument("--requests", type=int, default=96, help="of the trace, from its first one on")
    parser.add_argument("--scale", type=int, default=4, help="divides prompt and output lengths")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.4, 0.6, 0.75, 0.9, 1.05])
    parser.add_argument("--limits", type=float, nargs="+", default=[0.1, 0.2], help="s/token")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch, for all systems")
    parser.add_argument("--processor-time", action="store_true", help="see above; with --threads 1")
    parser.add_argument("--json", type=Path, help="file that the curves are written to")
    options = parser.parse_args()
    if options.processor_time and options.threads != 1:
        parser.error("--processor-time: expected --threads 1")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        found = list(curves(options, make_model(Path(name) / "model", options.dtype)))
    for limit_s in options.limits:
        rates = []
        for curve in found:
            rate, is_reached = curve.sustained(limit_s)
            rates.append(rate)
            print(f"{curve.system}: {'' if is_reached else 'at least '}{rate:.2f} requests/s at {limit_s} s/token")
        peer = max(rates[1:])
        if peer > 0:
            what = f"rate at {limit_s} s/token against the better of transformers' two"
            print_goal(what, f"{PEER_RATIO}x", f"{rates[0] / peer:.2f}x")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(curve) for curve in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
