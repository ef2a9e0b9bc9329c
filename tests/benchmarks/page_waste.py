"""What KV blocks waste on traces: the share of held slots that hold no token, as an average over time.

    PYTHONPATH=tests python tests/benchmarks/page_waste.py azure_llm_2023_conv.csv azure_llm_2023_code.csv [--short]

The engine's own scheduler and cache serve each trace on virtual time, with a step's time by the packaged profile: all
requests at once, and with arrivals stretched so that the engine is busy for 80 % of the time. No prefix is shared:
a full block is shared whole, whatever its size.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from pagestream_engine import SchedulerConfig
from pagestream_engine.kv_cache import BlockPool, CacheManager
from pagestream_engine.kv_cache.manager import fragmentation
from pagestream_engine.plan import full_attention
from pagestream_simulator.load import SAMPLE, TraceRow, read_trace
from pagestream_simulator.profile import packaged_profile, read_profile
from pagestream_simulator.virtual_engine import StepContents, VirtualEngine, VirtualRequest

BLOCK_SIZES = (16, 32, 64, 128)
SHORT_REQUESTS = 200
POOL_TOKENS = 1 << 18
"""As an 80 GB card has beside a model of 13 billion parameters."""
LOAD = 0.8


def saturated(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Let all requests arrive at once."""
    return [replace(row, arrival_s=0.0) for row in rows]


def at_load(rows: Sequence[TraceRow], capacity_s: float) -> list[TraceRow]:
    """Stretch the arrivals so that the engine, which takes `capacity_s` for all of them at once, is busy for LOAD of
    the time."""
    factor = capacity_s / LOAD / rows[-1].arrival_s
    return [replace(row, arrival_s=row.arrival_s * factor) for row in rows]


def waste(rows: Sequence[TraceRow], block_size: int) -> tuple[float, float]:
    """Serve a trace.

    Returns:
        The average, over the time in which blocks are held, of the share of their slots that hold no token; and the
        seconds that it took.
    """
    cache = CacheManager(BlockPool(POOL_TOKENS // block_size), full_attention(block_size), enable_prefix_caching=True)
    cost = read_profile(packaged_profile()).cost
    engine = VirtualEngine(SchedulerConfig(), cache, lambda step: StepContents.of(step).seconds(cost))
    wasted_s = busy_s = 0.0

    def note(seconds: float) -> None:
        nonlocal wasted_s, busy_s
        wasted_s += seconds * fragmentation(cache, engine.scheduler.running())
        busy_s += seconds

    engine.run([VirtualRequest(row.arrival_s, row.input_tokens, row.output_tokens) for row in rows], note)
    return wasted_s / busy_s, engine.now_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=[SAMPLE], help="files of traces (default: the packaged sample)")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_REQUESTS} requests of each, blocks of 16")
    options = parser.parse_args()
    print("| trace | requests | tokens a block | all at once | at 80 % load |\n|---|---|---|---|---|")
    for name in options.traces:
        rows = read_trace(name, SHORT_REQUESTS if options.short else None)
        for block_size in BLOCK_SIZES[:1] if options.short else BLOCK_SIZES:
            full, capacity_s = waste(saturated(rows), block_size)
            loaded, _ = waste(at_load(rows, capacity_s), block_size)
            print(f"| {name} | {len(rows):,} | {block_size} | {full:.2%} | {loaded:.2%} |", flush=True)


if __name__ == "__main__":
    main()
