"""How much of the held KV blocks holds no token while a trace is served, as an average over time."""

from collections.abc import Sequence
from dataclasses import replace

from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.cache.fragmentation import fragmentation
from pagestream_engine.cache.kv_groups import full_attention
from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.config import SchedulerConfig
from pagestream_simulator.engine.step_contents import StepContents
from pagestream_simulator.engine.virtual_engine import VirtualEngine, VirtualRequest
from pagestream_simulator.fleet.profile import packaged_profile, read_profile
from pagestream_simulator.traces.files import TraceRow

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
