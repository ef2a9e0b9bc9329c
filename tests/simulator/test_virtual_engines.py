"""The real scheduler on virtual time: one engine, and the bound on inter-token latency."""

from dataclasses import replace

import numpy as np
import pytest
from pagestream_engine import SchedulerConfig
from pagestream_engine.kv_cache import BlockPool, CacheManager
from pagestream_engine.plan import full_attention
from pagestream_simulator import (
    EngineProfile,
    Fleet,
    Load,
    StepContents,
    StepCost,
    VirtualEngine,
    VirtualRequest,
)
from support.engines.measured_steps import DECODES_S, MeasuredMachine, run_beside_streams

# -- The real scheduler on virtual time, and the fleet's C++ beside it, which follows the same rules in its own words


COST = StepCost(fixed_s=0.01, prefill_token_s=0.0005, prefill_pair_s=1e-7, decode_s=0.0002, decode_context_s=1e-6)
AMPLE = EngineProfile(COST, kv_blocks=2048)


def make_engine(profile: EngineProfile, *, num_ahead: int = 0) -> VirtualEngine:
    cache = CacheManager(BlockPool(profile.kv_blocks), full_attention(profile.block_size), enable_prefix_caching=False)
    config = SchedulerConfig(profile.max_num_seqs, profile.max_num_batched_tokens)
    return VirtualEngine(config, cache, lambda step: StepContents.of(step).seconds(profile.cost), num_ahead=num_ahead)


def drawn(count: int, seconds: float) -> list[VirtualRequest]:
    rng = np.random.default_rng(0)
    columns = np.sort(rng.uniform(0, seconds, count)), rng.integers(1, 400, count), rng.integers(1, 80, count)
    return [VirtualRequest(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


GROWING = [VirtualRequest(0.0, 100 + number, 300 - 7 * number) for number in range(5)]
"""Fit when they arrive, and outgrow a pool of 40 blocks."""


@pytest.mark.builds
@pytest.mark.parametrize(
    ("profile", "requests", "preempts"),
    [
        (AMPLE, drawn(400, 60.0), False),
        (replace(AMPLE, max_num_seqs=64, max_num_batched_tokens=64), drawn(150, 30.0), False),
        (replace(AMPLE, kv_blocks=40), GROWING, True),
    ],
)
def test_the_fleets_engine_schedules_as_the_real_one(
    profile: EngineProfile, requests: list[VirtualRequest], preempts: bool
) -> None:
    engine = make_engine(profile)
    engine.run(requests)
    columns = [np.array(column) for column in zip(*(request[:3] for request in requests), strict=True)]
    lengths = (column.astype(np.int32) for column in columns[1:])
    with Fleet(Load(columns[0], *lengths, np.zeros(len(requests), np.int32)), profile, partitions=1) as fleet:
        fleet.add_engine(0.0)
        assert fleet.advance(np.inf)
        assert fleet.first_s == pytest.approx(engine.first_s, rel=1e-9)
        assert fleet.end_s == pytest.approx(engine.end_s, rel=1e-9)
        assert fleet.engine(0).preemptions == engine.scheduler.num_preemptions
    assert bool(engine.scheduler.num_preemptions) == preempts


def test_a_step_ahead_is_scheduled_before_the_one_that_runs_has_ended() -> None:
    """So a request that comes meanwhile waits for one step more, and one that has ended is computed once more."""
    requests = [VirtualRequest(0.0, 10, 20), VirtualRequest(0.05, 10, 1)]
    engines = [make_engine(AMPLE, num_ahead=num_ahead) for num_ahead in (0, 1)]
    for engine in engines:
        engine.run(requests)
        assert np.isfinite(engine.end_s).all()
        assert engine.cache.pool.num_free == AMPLE.kv_blocks
    at_once, ahead = engines
    step_s = COST.fixed_s + COST.decode_s
    assert ahead.first_s[0] == pytest.approx(at_once.first_s[0])
    assert ahead.first_s[1] - at_once.first_s[1] == pytest.approx(step_s, rel=0.1)
    assert ahead.now_s - ahead.end_s.max() == pytest.approx(step_s, rel=0.1)


# -- What the bound on inter-token latency keeps where steps take what was measured, without a machine's noise


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_steps_beside_long_prompts_take_the_bound_and_hardly_more(num_ahead: int) -> None:
    """With costs that are linear in nothing, for a first long prompt, and for one after it."""
    machine, bound_s = MeasuredMachine(), 2 * DECODES_S
    run_beside_streams(machine, bound_s, [1.0, 90.0], num_ahead)
    arrivals = list(machine.arrivals())
    assert len(arrivals) == 2
    for steps in arrivals:
        times = [seconds / bound_s for context, _, seconds in steps if context >= 0]
        assert len(times) > 400
        assert np.mean(times) > 0.85
        assert np.percentile(times, 99) <= 1.1
        assert max(times) <= 1.3
