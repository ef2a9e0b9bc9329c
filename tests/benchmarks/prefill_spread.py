"""What spreading waiting prompts over steps does to TTFT, ITL and throughput, on virtual time with the real scheduler.

    PYTHONPATH=tests python tests/benchmarks/prefill_spread.py [--spreads 1 4 8] [--traces FILE.csv ...]
    PYTHONPATH=tests python tests/benchmarks/prefill_spread.py --real [--rounds 2]: the reference model's processor time

Closed loops as `vllm_serve.py` has them (each stream asks again when it has its answer), and request traces, made so
dense that an engine is busy for `--utilisation` of the time. Steps take what `StepCost` says, with 5 % of noise: costs
of the reference model by two threads with AMX in bfloat16, and with AVX2 alone in float32, rounded from what was served
(docs/benchmarks/vllm-bench.md). With `--real` the engine computes the closed loop of 64 streams by one thread, whose
processor time stands for time: for a machine with other load. Spreads take turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from goals import print_goal
from pagestream_engine import SchedulerConfig
from pagestream_engine.kv_cache import BlockPool, CacheManager
from pagestream_engine.plan import ScheduledStep, full_attention
from pagestream_simulator import StepContents, StepCost, VirtualEngine, VirtualRequest, read_trace

COSTS = {
    "AMX, bfloat16": StepCost(
        fixed_s=0.012, prefill_token_s=165e-6, prefill_pair_s=6e-8, decode_s=0.3e-3, decode_context_s=1e-6
    ),
    "AVX2, float32": StepCost(
        fixed_s=0.025, prefill_token_s=850e-6, prefill_pair_s=2e-7, decode_s=2.2e-3, decode_context_s=4e-6
    ),
}
CLOSED = {"16 streams": (16, 160, 128, 64), "64 streams": (64, 256, 128, 64)}
"""Streams, requests, prompt tokens and output tokens."""
RUNNING = 16
"""Decodes that share a step's fixed time, where a trace's work is summed up."""
MOST_THINKING_S = 0.03
"""Between an answer's end and the stream's next request."""


@dataclass
class Course:
    """What requests have seen."""

    arrived_s: dict[int, float] = field(default_factory=dict)
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    intervals_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def note(self, number: int, now_s: float) -> None:
        """Note a token of a request."""
        self.num_tokens += 1
        if number in self.last_s:
            self.intervals_s.append(now_s - self.last_s[number])
        else:
            self.first_s[number] = now_s
        self.last_s[number] = now_s

    def figures(self) -> dict[str, float]:
        """Return tokens a second, and milliseconds."""
        ttft = [1e3 * (self.first_s[number] - at_s) for number, at_s in self.arrived_s.items()]
        itl = 1e3 * np.array(self.intervals_s)
        took_s = max(self.last_s.values()) - min(self.arrived_s.values())
        return {
            "tokens/s": self.num_tokens / took_s,
            "TTFT p50": float(np.percentile(ttft, 50)),
            "TTFT mean": float(np.mean(ttft)),
            "TTFT p99": float(np.percentile(ttft, 99)),
            "ITL p50": float(np.percentile(itl, 50)),
            "ITL p99": float(np.percentile(itl, 99)),
            "ITL max": float(itl.max()),
        }


def serve(cost: StepCost, spread: int, requests: list[VirtualRequest], num_streams: int = 0) -> dict[str, float]:
    """Serve requests as they arrive, or in a closed loop of `num_streams`."""
    rng = np.random.default_rng(0)

    def step_s(step: ScheduledStep) -> float:
        return StepContents.of(step).seconds(cost) * max(0.7, rng.normal(1.0, 0.05))

    cache = CacheManager(BlockPool(65536), full_attention(16), enable_prefix_caching=False)
    engine = VirtualEngine(SchedulerConfig(prefill_spread_steps=spread), cache, step_s)
    course, later = Course(), deque(enumerate(requests))
    coming = deque((request.arrival_s, number, request) for number, request in enumerate(requests))
    if num_streams:
        coming = deque((0.001 * place, *later.popleft()) for place in range(num_streams))
    while True:
        while coming and coming[0][0] <= engine.now_s:
            at_s, number, request = coming.popleft()
            course.arrived_s[number] = at_s
            engine.add(number, request)
        if engine.launch() is None:
            if not coming:
                return course.figures()
            engine.now_s = coming[0][0]
            continue
        collected = engine.collect()
        for seq in collected.sampled:
            course.note(seq.arrival, engine.now_s)
        if num_streams:
            for _ in collected.ended[: len(later)]:
                coming.append((engine.now_s + MOST_THINKING_S * rng.random(), *later.popleft()))
            coming = deque(sorted(coming))


def serve_real(engine: Any, requests: list[VirtualRequest], num_streams: int) -> dict[str, float]:
    """Serve a closed loop by an engine that computes, in processor time of this thread."""
    from pagestream_engine import SamplingParams

    course, later = Course(), deque(enumerate(requests))
    rng = np.random.default_rng(0)

    def ask() -> None:
        number, request = later.popleft()
        course.arrived_s[number] = time.thread_time()
        params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
        engine.add_request(str(number), rng.integers(3, 8000, request.prompt_tokens).tolist(), params)

    for _ in range(num_streams):
        ask()
    while len(course.last_s) < len(requests) or engine.has_unfinished_requests():
        outputs = engine.step()
        now_s = time.thread_time()
        for output in outputs:
            if output.token_id is not None:
                course.note(int(output.seq_id), now_s)
            if output.finish_reason is not None and later:
                ask()
    return course.figures()


def measure_real(spreads: list[int], rounds: int) -> None:
    """Print a row for each round and spread."""
    import torch
    from itl_bound import make_model, use_processor_time
    from pagestream_engine import Engine, EngineConfig

    use_processor_time()
    torch.set_num_threads(1)
    streams, count, prompt, output = CLOSED["64 streams"]
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "model", "bfloat16", 2048)
        for number in range(rounds):
            for spread in sorted(spreads, reverse=bool(number % 2)):
                engine = Engine(folder, EngineConfig.from_options({"prefill_spread_steps": spread}))
                figures = serve_real(engine, [VirtualRequest(0.0, prompt, output)] * (count // 2), streams)
                cells = " | ".join(f"{value:,.0f}" for value in figures.values())
                print(f"| real, processor time | 64 streams | {spread} | {cells} |", flush=True)


def trace_requests(path: Path, count: int, cost: StepCost, utilisation: float) -> list[VirtualRequest]:
    """Return a trace's requests, arriving at the rate that keeps the engine busy for `utilisation` of the time."""
    rows = read_trace(str(path), limit=count)
    work_s = sum(
        StepContents(row.input_tokens, row.input_tokens**2 // 2, 0, 0).seconds(cost)
        + row.output_tokens
        * (cost.fixed_s / RUNNING + cost.decode_s + cost.decode_context_s * (row.input_tokens + row.output_tokens / 2))
        for row in rows
    )
    factor = work_s / utilisation / rows[-1].arrival_s
    return [VirtualRequest(row.arrival_s * factor, max(1, row.input_tokens), max(1, row.output_tokens)) for row in rows]


def main() -> None:
    """Print a row for each machine, load and spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="closed loops alone")
    parser.add_argument("--spreads", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--traces", type=Path, nargs="*", default=[])
    parser.add_argument(
        "--utilisation", type=float, default=0.5, help="share of time that a trace keeps an engine busy"
    )
    parser.add_argument("--requests", type=int, default=500, help="of each trace")
    parser.add_argument("--real", action="store_true", help="the engine on this machine, in place of virtual time")
    parser.add_argument("--rounds", type=int, default=2, help="with --real")
    options = parser.parse_args()
    print("| machine | load | steps | tokens/s | TTFT p50 | mean | p99 ms | ITL p50 | p99 | max ms |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    if options.real:
        measure_real(options.spreads, options.rounds)
        return
    for machine, cost in COSTS.items():
        loads = {
            name: ([VirtualRequest(0.0, prompt, output)] * count, streams)
            for name, (streams, count, prompt, output) in CLOSED.items()
        }
        for path in () if options.short else options.traces:
            loads[path.stem] = trace_requests(path, options.requests, cost, options.utilisation), 0
        for name, (requests, num_streams) in loads.items():
            found = {spread: serve(cost, spread, requests, num_streams) for spread in options.spreads}
            for spread, figures in found.items():
                cells = " | ".join(f"{value:,.0f}" for value in figures.values())
                print(f"| {machine} | {name} | {spread} | {cells} |", flush=True)
            if name == "64 streams" and {1, 4} <= found.keys():
                ratios = {figure: found[4][figure] / found[1][figure] for figure in ("ITL p99", "tokens/s")}
                what = f"{machine}, 64 streams, prompts spread over 4 steps against none"
                print_goal(f"{what}: ITL p99", "<= 0.5x", f"{ratios['ITL p99']:.2f}x")
                print_goal(f"{what}: throughput", ">= 0.98x", f"{ratios['tokens/s']:.3f}x")


if __name__ == "__main__":
    main()
