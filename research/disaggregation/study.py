"""The study of disaggregation: `python -m research.disaggregation.study --traces DIR --output FILE`.

Four engines serve a trace on virtual time, each with the engine's own scheduler and cache: as one mixed pool, with and
without a bound on inter-token latency, or some as prefill engines that hand each prompt over to the others, which
decode. Lengths are a trace's, in its order; arrivals are Poisson's, as in DistServe's evaluation, at shares of the
capacity, which is what the mixed pool completes a second where all arrive at once. A run takes some seconds of
processor; results are written as they come, and an interrupted study resumes after the last one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pagestream_engine.config import DEFAULT_BLOCK_SIZE, SchedulerConfig
from pagestream_engine.kv_cache.block_pool import BlockPool
from pagestream_engine.kv_cache.manager import CacheManager
from pagestream_engine.plan import ScheduledStep, full_attention
from pagestream_simulator.load import TraceRow, read_trace, scale_to_context
from pagestream_simulator.profile import packaged_profile, read_profile
from pagestream_simulator.virtual_engine import Floats, StepContents, VirtualEngine, VirtualRequest

from research.disaggregation.gpu_steps import H100_SXM, LLAMA_3_1_8B, LLAMA_3_1_8B_ON_TWO_A100, Roofline
from research.disaggregation.pool import Handover, ReceivedBlocks, VirtualPool
from research.disaggregation.report import tables, write_plot
from research.scheduling_policies.study import figures, thinned

TRACES = ("mooncake_conversation.jsonl", "azure_llm_2023_code.csv")
REQUESTS = 500
"""Of each trace, evenly thinned."""
ENGINES = 4
LOADS = (0.4, 0.6, 0.8, 1.0, 1.2, 1.5)
"""Arrivals, as shares of the mixed pool's capacity."""
LOST_AT = 0.8
"""The load of the runs in which blocks are lost."""
LOST_SHARE = 0.1
"""Of prompts whose blocks are lost, in the runs that have it."""
A100_LINK_BYTES_PER_S = 25e9
"""NVIDIA DGX A100 data sheet: a ConnectX-6 of 200 Gb/s for each GPU."""
CPU_CONTEXT = 8192
"""Tokens to which traces are scaled for the small model; its steps were measured up to there (itl-bound.md)."""
SEED = 0

Kept = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """What an engine runs on."""

    step_seconds: Callable[[StepContents], float]
    kv_blocks: int
    token_bytes: int
    """Keys and values of a token."""
    link_bytes_per_s: float
    context: int
    """Longer requests of a trace are scaled to it."""

    def run_alone_s(self, prompt_tokens: int) -> float:
        """Return what a prompt takes where nothing else runs."""
        chunk = SchedulerConfig().max_num_batched_tokens
        parts = [(start, min(chunk, prompt_tokens - start)) for start in range(0, prompt_tokens, chunk)]
        contents = (StepContents(size, size * start + size * (size + 1) // 2, 0, 0) for start, size in parts)
        return sum(map(self.step_seconds, contents))


@dataclass(frozen=True)
class Objectives:
    """What a request's times shall be at most, in seconds: its first token, and the mean time between two others."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class PoolShape:
    """How four engines are used."""

    prefill: int = 0
    """Engines that compute prompts alone; 0: all do everything."""
    is_bounded: bool = False
    """Whether steps have the strict objective of TPOT as their bound."""
    lost_share: float = 0.0


SHAPES = {
    "mixed": PoolShape(),
    "mixed, bounded": PoolShape(is_bounded=True),
    **{f"split {count}:{ENGINES - count}": PoolShape(count) for count in range(1, ENGINES)},
    f"split 2:2, {LOST_SHARE:.0%} lost": PoolShape(2, lost_share=LOST_SHARE),
}


def machines() -> dict[str, Machine]:
    """Return the measured CPU, the GPU that is derived from its data sheet, and a pair of GPUs that was measured."""
    profile = read_profile(packaged_profile())
    roofline = Roofline(H100_SXM, LLAMA_3_1_8B)
    token_bytes = LLAMA_3_1_8B.kv_token_bytes

    def kv_blocks(memory_bytes: float) -> int:
        left = 0.9 * memory_bytes - 16.1e9  # All parameters in bfloat16.
        return int(left / token_bytes / DEFAULT_BLOCK_SIZE)

    return {
        "cpu": Machine(lambda step: step.seconds(profile.cost), 16_384, 12_288, 1.25e9, CPU_CONTEXT),
        "gpu": Machine(
            roofline.seconds,
            kv_blocks(H100_SXM.memory_bytes),
            token_bytes,
            H100_SXM.link_bytes_per_s,
            131_072,
        ),
        "measured gpu": Machine(
            LLAMA_3_1_8B_ON_TWO_A100.seconds, kv_blocks(2 * 80e9), token_bytes, 2 * A100_LINK_BYTES_PER_S, 131_072
        ),
    }


def objectives(machine: Machine, rows: Sequence[TraceRow]) -> dict[str, Objectives]:
    """Return both pairs: five times the 90th percentile of prompts alone, and 2 or 5 times a step of 16 decodes."""
    prompts = [row.input_tokens for row in rows]
    ttft_s = 5 * machine.run_alone_s(int(np.percentile(prompts, 90)))
    step_s = machine.step_seconds(StepContents(0, 0, 16, 16 * int(np.median(prompts))))
    return {"strict": Objectives(ttft_s, 2 * step_s), "loose": Objectives(ttft_s, 5 * step_s)}


def drawn(rows: Sequence[TraceRow], requests_per_s: float) -> list[VirtualRequest]:
    """Return the requests with arrivals at random; an infinite rate: all at once."""
    rng = random.Random(SEED)
    now_s, requests = 0.0, []
    for row in rows:
        now_s += rng.expovariate(1.0) / requests_per_s
        requests.append(VirtualRequest(now_s, row.input_tokens, row.output_tokens))
    return requests


def serve(requests: Sequence[VirtualRequest], machine: Machine, shape: PoolShape, bound_s: float) -> VirtualPool:
    """Serve requests by a pool of a shape; return it after the last end."""
    config = SchedulerConfig(itl_bound_ms=1e3 * bound_s if shape.is_bounded else None)

    def step_s(step: ScheduledStep) -> float:
        return machine.step_seconds(StepContents.of(step))

    def make(*, receives: bool) -> VirtualEngine:
        pool, layout = BlockPool(machine.kv_blocks), full_attention(DEFAULT_BLOCK_SIZE)
        tier = ReceivedBlocks(pool, machine.kv_blocks) if receives else None
        return VirtualEngine(config, CacheManager(pool, layout, enable_prefix_caching=True, tier=tier), step_s)

    claiming = [make(receives=False) for _ in range(shape.prefill or ENGINES)]
    decoding = [make(receives=True) for _ in range(ENGINES - len(claiming))]
    handover = Handover(machine.token_bytes, machine.link_bytes_per_s, shape.lost_share)
    pool = VirtualPool(claiming, claim_tokens=config.max_num_batched_tokens, decoding=decoding, handover=handover)
    pool.run(requests)
    return pool


def outcome(requests: Sequence[VirtualRequest], pool: VirtualPool, wanted: Mapping[str, Objectives]) -> Kept:
    """Return a run's figures, and the share of requests that met each pair of objectives."""
    arrival_s, _, output_tokens = (np.array(column) for column in zip(*(r[:3] for r in requests), strict=True))
    ttft_s: Floats = pool.first_s - arrival_s
    tpot_s: Floats = (pool.end_s - pool.first_s) / np.maximum(1, output_tokens - 1)
    met = {name: (ttft_s <= pair.ttft_s) & (tpot_s <= pair.tpot_s) for name, pair in wanted.items()}
    return {
        "ttft_s": figures(ttft_s),
        "itl_s": figures(np.frombuffer(pool.gaps_s)),
        "tpot_s": figures(tpot_s),
        "met": {name: float(np.mean(each)) for name, each in met.items()},
        "duration_s": pool.now_s,
    }


def study(traces: Mapping[str, Sequence[TraceRow]], kept: Kept, keep: Callable[[Kept], None]) -> None:
    """Run what isn't in `kept` yet, and call `keep` with all results after each run."""

    def once(name: str, work: Callable[[], Kept]) -> Kept:
        if name not in kept:
            kept[name] = work()
            print(f"{name}: {json.dumps(kept[name])[:300]}", file=sys.stderr, flush=True)
            keep(kept)
        found: Kept = kept[name]
        return found

    for machine_name, machine in machines().items():
        for trace, unscaled in traces.items():
            rows = scale_to_context(unscaled, machine.context)
            wanted = objectives(machine, rows)
            capacity = partial(_capacity, rows, machine, wanted)
            per_s = once(f"{machine_name}/{trace}", capacity)["requests_per_s"]
            for load in LOADS:
                requests = drawn(rows, load * per_s)
                for name, shape in SHAPES.items():
                    if shape.lost_share and load != LOST_AT:
                        continue
                    run = partial(_run, requests, machine, shape, wanted)
                    once(f"{machine_name}/{trace}/{load:g}/{name}", run)


def _capacity(rows: Sequence[TraceRow], machine: Machine, wanted: Mapping[str, Objectives]) -> Kept:
    seconds = serve(drawn(rows, np.inf), machine, PoolShape(), wanted["strict"].tpot_s).now_s
    return {"requests_per_s": len(rows) / seconds, **{name: asdict(pair) for name, pair in wanted.items()}}


def _run(
    requests: Sequence[VirtualRequest], machine: Machine, shape: PoolShape, wanted: Mapping[str, Objectives]
) -> Kept:
    return outcome(requests, serve(requests, machine, shape, wanted["strict"].tpot_s), wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study, print its tables and draw its plot."""
    parser = argparse.ArgumentParser(description="Serves traces by mixed and split pools, on virtual time.")
    parser.add_argument("--traces", type=Path, metavar="DIR", help=f"folder with {', '.join(TRACES)}; else only tables")
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help="of each trace")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON; an existing file is resumed")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG")
    given = parser.parse_args(arguments)
    kept: Kept = json.loads(given.output.read_text()) if given.output.exists() else {}
    if given.traces is not None:
        traces = {name: thinned(read_trace(str(given.traces / name)), given.requests) for name in TRACES}
        study(traces, kept, lambda content: _write(given.output, content))
    print("\n".join(tables(kept)))
    if given.plot is not None:
        write_plot(kept, given.plot)
    return 0


def _write(path: Path, content: Kept) -> None:
    made = path.with_suffix(".part")
    made.write_text(json.dumps(content, indent=1) + "\n")
    made.replace(path)


if __name__ == "__main__":
    sys.exit(main())
