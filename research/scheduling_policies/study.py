"""The study of scheduling policies: `python -m research.scheduling_policies.study --traces DIR --output FILE`.

One engine serves a trace under each policy, on virtual time: its own scheduler, cache and policies, with step times of
a measured profile. All requests that wait are the engine's, so that its policy orders them all. A trace is thinned in
its order and its arrivals are stretched to a share of the capacity, which is what the engine completes a second where
all requests arrive at once. A run takes some seconds of processor; results are written as they come, and an interrupted
study resumes after the last one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pagestream_engine.config import SchedulerConfig
from pagestream_engine.kv_cache.block_pool import BlockPool
from pagestream_engine.kv_cache.manager import CacheManager
from pagestream_engine.plan import full_attention
from pagestream_simulator.load import TraceRow, read_trace
from pagestream_simulator.profile import EngineProfile, packaged_profile, read_profile
from pagestream_simulator.virtual_engine import Floats, StepContents, VirtualEngine, VirtualRequest

from research.scheduling_policies.report import tables, write_plot

TRACES = ("azure_llm_2023_conv.csv", "azure_llm_2023_code.csv")
POLICIES = ("fcfs", "priority", "shortest_first", "round_robin", "fair")
LOADS = (0.8, 1.1)
"""Arrivals, as shares of the capacity."""
REQUESTS = 3000
"""Of each trace, evenly thinned: the hour's shape stays."""
KV_BLOCKS = 2048
"""Of the pool: 32,768 tokens, 400 MB of the reference model. The packaged profile's is for shorter requests."""
CLASSES = {0: 0.2, 1: 0.3, 2: 0.5}
"""Shares of the priority classes; which request has which is drawn."""
TENANTS = {"a": 0.7, "b": 0.15, "c": 0.1, "d": 0.05}
"""Shares of the tenants, drawn apart from the classes."""
SEED = 0
FCFS = POLICIES[0]

Kept = dict[str, Any]


def thinned(rows: Sequence[TraceRow], count: int) -> list[TraceRow]:
    """Return `count` requests at equal distances, in order."""
    return [rows[place * len(rows) // count] for place in range(min(count, len(rows)))]


def drawn(rows: Sequence[TraceRow], duration_s: float) -> list[VirtualRequest]:
    """Return the requests with arrivals stretched to `duration_s` (0: all at once), and drawn classes and tenants."""
    rng = random.Random(SEED)
    factor = duration_s / rows[-1].arrival_s
    classes = rng.choices(list(CLASSES), list(CLASSES.values()), k=len(rows))
    tenants = rng.choices(list(TENANTS), list(TENANTS.values()), k=len(rows))
    return [
        VirtualRequest(row.arrival_s * factor, row.input_tokens, row.output_tokens, priority, tenant)
        for row, priority, tenant in zip(rows, classes, tenants, strict=True)
    ]


def serve(requests: Sequence[VirtualRequest], profile: EngineProfile, policy: str) -> VirtualEngine:
    """Serve requests under a policy; return the engine after the last end."""
    config = SchedulerConfig(
        max_num_seqs=profile.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        scheduling_policy=policy,
    )
    layout = full_attention(profile.block_size)
    cache = CacheManager(BlockPool(profile.kv_blocks), layout, enable_prefix_caching=True)
    engine = VirtualEngine(config, cache, lambda step: StepContents.of(step).seconds(profile.cost))
    engine.run(requests)
    return engine


def figures(seconds: Floats) -> dict[str, float]:
    """Return mean, median and 99th percentile."""
    p50, p99 = np.percentile(seconds, (50, 99))
    return {"mean": float(np.mean(seconds)), "p50": float(p50), "p99": float(p99)}


def outcome(requests: Sequence[VirtualRequest], engine: VirtualEngine) -> Kept:
    """Return a run's figures: of all requests, and of each class and tenant."""
    arrival_s = np.array([request.arrival_s for request in requests])
    times = {"ttft_s": engine.first_s - arrival_s, "whole_s": engine.end_s - arrival_s}
    parts = {f"class {each}": np.array([request.priority == each for request in requests]) for each in CLASSES}
    parts |= {f"tenant {each}": np.array([request.tenant == each for request in requests]) for each in TENANTS}
    return {
        **{name: figures(seconds) for name, seconds in times.items()},
        "parts": {
            part: {name: figures(seconds[chosen]) for name, seconds in times.items()} for part, chosen in parts.items()
        },
        "preempted": engine.scheduler.num_preemptions,
        "displaced": engine.scheduler.num_displaced,
        "duration_s": engine.now_s,
    }


def study(
    traces: Mapping[str, Sequence[TraceRow]], profile: EngineProfile, kept: Kept, keep: Callable[[Kept], None]
) -> None:
    """Run what isn't in `kept` yet, and call `keep` with all results after each run."""

    def once(name: str, work: Callable[[], Kept]) -> Kept:
        if name not in kept:
            kept[name] = work()
            print(f"{name}: {json.dumps(kept[name])[:200]}", file=sys.stderr, flush=True)
            keep(kept)
        found: Kept = kept[name]
        return found

    def capacity(rows: Sequence[TraceRow]) -> Kept:
        seconds = serve(drawn(rows, 0.0), profile, FCFS).now_s
        return {"requests": len(rows), "seconds": seconds, "requests_per_s": len(rows) / seconds}

    def run(requests: Sequence[VirtualRequest], policy: str) -> Kept:
        return outcome(requests, serve(requests, profile, policy))

    for trace, rows in traces.items():
        busy_s = once(f"capacity {trace}", lambda rows=rows: capacity(rows))["seconds"]  # type: ignore[misc]
        for load in LOADS:
            requests = drawn(rows, busy_s / load)
            for policy in POLICIES:
                once(f"{trace} {load:g} {policy}", lambda r=requests, p=policy: run(r, p))  # type: ignore[misc]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study, print its tables and draw its plot."""
    parser = argparse.ArgumentParser(description="Serves traces under each scheduling policy, on virtual time.")
    parser.add_argument("--traces", type=Path, metavar="DIR", help=f"folder with {', '.join(TRACES)}; else only tables")
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help="of each trace")
    parser.add_argument("--profile", type=Path, default=packaged_profile(), metavar="FILE", help="engine profile")
    parser.add_argument("--kv-blocks", type=int, default=KV_BLOCKS, metavar="N", help="of the engine's pool")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON; an existing file is resumed")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG")
    given = parser.parse_args(arguments)
    kept: Kept = json.loads(given.output.read_text()) if given.output.exists() else {}
    if given.traces is not None:
        traces = {name: thinned(read_trace(str(given.traces / name)), given.requests) for name in TRACES}
        profile = replace(read_profile(given.profile), kv_blocks=given.kv_blocks)
        study(traces, profile, kept, lambda content: _write(given.output, content))
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
