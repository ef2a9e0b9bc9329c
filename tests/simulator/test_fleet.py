"""The fleet in C++, and the profile of its engines."""

from pathlib import Path

import numpy as np
import pytest
from pagestream_simulator import (
    EngineProfile,
    Fleet,
    InputFileInvalidError,
    Load,
    StepCost,
    packaged_profile,
    read_profile,
    write_profile,
)

pytestmark = pytest.mark.builds

COST = StepCost(fixed_s=0.01, prefill_token_s=0.0005, prefill_pair_s=1e-7, decode_s=0.0002, decode_context_s=1e-6)


def make_load(arrivals: list[float], prompt: list[int], output: list[int], partitions: int = 4) -> Load:
    count = len(arrivals)
    return Load(
        np.array(arrivals, dtype=np.float64),
        np.array(prompt, dtype=np.int32),
        np.array(output, dtype=np.int32),
        np.arange(count, dtype=np.int32) % partitions,
    )


def drawn_load(count: int = 400, seconds: float = 60.0, seed: int = 0) -> Load:
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(0, seconds, count))
    return Load(
        arrivals,
        rng.integers(1, 400, count, dtype=np.int32),
        rng.integers(1, 80, count, dtype=np.int32),
        rng.integers(0, 8, count, dtype=np.int32),
    )


def test_one_request_takes_what_its_steps_cost() -> None:
    load = make_load([1.0], [100], [3])
    with Fleet(load, EngineProfile(COST), partitions=4) as fleet:
        fleet.add_engine(0.0)
        assert fleet.advance(10.0)
    prefill = 0.01 + 100 * 0.0005 + 5050 * 1e-7
    assert fleet.first_s[0] == pytest.approx(1.0 + prefill)
    decodes = 2 * (0.01 + 0.0002) + (101 + 102) * 1e-6
    assert fleet.end_s[0] == pytest.approx(1.0 + prefill + decodes)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    load = make_load([0.0], [250], [1])
    with Fleet(load, EngineProfile(COST, max_num_seqs=8, max_num_batched_tokens=100), partitions=4) as fleet:
        fleet.add_engine(0.0)
        assert fleet.advance(10.0)
    assert fleet.first_s[0] == pytest.approx(3 * 0.01 + 250 * 0.0005 + 250 * 251 / 2 * 1e-7)


def test_every_token_is_made_once_and_every_prompt_computed_once() -> None:
    load = drawn_load()
    with Fleet(load, EngineProfile(COST), partitions=8) as fleet:
        engines = [fleet.add_engine(0.0) for _ in range(3)]
        assert fleet.advance(1000.0)
        states = [fleet.engine(engine) for engine in engines]
    assert sum(state.preemptions for state in states) == 0
    assert sum(state.generated_tokens for state in states) == load.output_tokens.sum()
    assert sum(state.prompt_tokens for state in states) == load.prompt_tokens.sum()
    assert all(state.kv_used_blocks == state.running == state.waiting == 0 for state in states)


def test_tokens_are_conserved_under_preemptions_and_drains_and_lost_work_is_computed_again() -> None:
    load = drawn_load()
    with Fleet(load, EngineProfile(COST, kv_blocks=40), partitions=8) as fleet:
        engines = [fleet.add_engine(0.0) for _ in range(3)]
        fleet.advance(20.0)
        for number in range(3):
            engines.append(fleet.add_engine(20.0))
            fleet.drain(engines[number])
        assert fleet.advance(10_000.0)
        states = [fleet.engine(engine) for engine in engines]
        queue = fleet.queue()
    assert sum(state.preemptions for state in states) > 0
    assert sum(state.generated_tokens for state in states) == load.output_tokens.sum()
    assert sum(state.prompt_tokens for state in states) > load.prompt_tokens.sum()
    assert (queue.depth, queue.tokens, queue.running) == (0, 0, 0)
    assert all(state.gone_s < 21.0 for state in states[:3])
    assert np.isfinite(fleet.end_s).all()


def test_a_drained_engine_hands_back_requests_that_another_continues() -> None:
    load = make_load([0.0], [100], [500])
    with Fleet(load, EngineProfile(COST), partitions=4) as fleet:
        first = fleet.add_engine(0.0)
        fleet.advance(2.0)
        made = fleet.engine(first).generated_tokens
        assert 0 < made < 500
        fleet.drain(first)
        second = fleet.add_engine(5.0)
        fleet.advance(4.9)
        assert fleet.queue().depth == 1
        assert fleet.advance(100.0)
        total = fleet.engine(first).generated_tokens
        assert made <= total <= made + 1
        assert fleet.engine(second).generated_tokens == 500 - total
        assert fleet.engine(second).prompt_tokens == 100 + total
    assert fleet.first_s[0] < 2.0


def test_blocks_are_taken_as_a_sequence_grows() -> None:
    load = make_load([0.0], [16], [100])
    seen: list[float] = []
    with Fleet(load, EngineProfile(COST), partitions=4) as fleet:
        engine = fleet.add_engine(0.0)
        for tick in range(2000):
            if fleet.advance(tick * 0.001):
                break
            seen.append(fleet.engine(engine).kv_used_blocks)
    grown = [blocks for blocks in dict.fromkeys(seen) if blocks]
    assert grown == [1, 2, 3, 4, 5, 6, 7, 8]  # 115 computed tokens at last, 16 in a block


def test_any_engine_may_claim_what_an_owner_leaves() -> None:
    arrivals, prompts = [0.0] * 8, [100] * 8
    load = make_load(arrivals, prompts, [1] * 8, partitions=1)
    with Fleet(
        load, EngineProfile(COST, claim_tokens=100, max_num_batched_tokens=100, max_num_seqs=4), partitions=1
    ) as f:
        engines = [f.add_engine(0.0) for _ in range(2)]
        assert f.advance(10.0)
        assert all(f.engine(engine).generated_tokens > 0 for engine in engines)


def test_requests_are_claimed_in_order_of_arrival_over_all_partitions() -> None:
    """A backlog on partition 0, and one request on partition 3 in the middle of it."""
    count, late = 60, 30
    load = make_load([0.2 * index for index in range(count)], [100] * count, [1] * count, partitions=1)
    load.partition[late] = 3
    cost = StepCost(fixed_s=1.0, prefill_token_s=0.0, prefill_pair_s=0.0, decode_s=0.0, decode_context_s=0.0)
    with Fleet(load, EngineProfile(cost, max_num_seqs=1), partitions=4) as fleet:
        fleet.add_engine(0.0)
        assert fleet.advance(1000.0)
        assert list(fleet.first_tokens(0)) == list(range(count))


def test_an_engine_that_preempts_leaves_requests_to_idle_ones() -> None:
    """A partition's owner, whose cache is full, once took requests that then waited beside idle engines for seconds."""
    rng = np.random.default_rng(0)
    count, rate = 1200, 4.0
    arrivals = np.sort(rng.uniform(0, count / rate, count)).tolist()
    load = make_load(arrivals, [200] * count, [200] * count, partitions=1)
    with Fleet(load, EngineProfile(COST, kv_blocks=128), partitions=1) as fleet:
        engines = [fleet.add_engine(0.0) for _ in range(20)]
        assert fleet.advance(10_000.0)
        assert sum(fleet.engine(engine).preemptions for engine in engines) > 0
    late = np.mean(fleet.first_s - load.arrival_s > 1.0)
    assert late < 0.005


def test_queue_state_has_depth_tokens_and_age() -> None:
    load = make_load([1.0, 2.0], [10, 20], [1, 1])
    with Fleet(load, EngineProfile(COST), partitions=4) as fleet:
        fleet.advance(3.0)
        queue = fleet.queue()
        assert (queue.depth, queue.tokens, queue.oldest_s, queue.running) == (2, 30, 1.0, 0)
        fleet.add_engine(4.0)
        assert fleet.advance(10.0)
        assert fleet.queue().claimed_tokens == 30
        assert list(fleet.first_tokens(0)) == [0, 1]
        assert len(fleet.first_tokens(2)) == 0
    assert (fleet.first_s >= 4.0).all()


@pytest.mark.parametrize("use", [*(pytest.param(use, marks=pytest.mark.slow) for use in (0.3, 0.6)), 0.8])
def test_one_engine_with_equal_requests_is_an_m_d_1_queue(use: float) -> None:
    """Mean wait of M/D/1 (Pollaczek-Khinchine): use * service / (2 * (1 - use))."""
    service = 0.1
    count = 60_000
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(service / use, count))
    load = Load(
        arrivals,
        np.full(count, 100, dtype=np.int32),
        np.ones(count, dtype=np.int32),
        np.zeros(count, dtype=np.int32),
    )
    cost = StepCost(fixed_s=0.0, prefill_token_s=service / 100, prefill_pair_s=0.0, decode_s=0.0, decode_context_s=0.0)
    with Fleet(load, EngineProfile(cost, max_num_seqs=1), partitions=1) as fleet:
        fleet.add_engine(0.0)
        assert fleet.advance(np.inf)
    waited = float(np.mean(fleet.first_s - load.arrival_s)) - service
    assert waited == pytest.approx(use * service / (2 * (1 - use)), rel=0.05)


def test_the_same_seed_gives_the_same_times() -> None:
    load = drawn_load()

    def times(seed: int) -> list[float]:
        with Fleet(load, EngineProfile(COST, kv_blocks=60), partitions=8, seed=seed) as fleet:
            for _ in range(3):
                fleet.add_engine(0.0)
            fleet.advance(1000.0)
        return [*fleet.first_s, *fleet.end_s]

    assert times(3) == times(3)
    assert times(3) != times(4)


def test_a_profile_round_trips_through_json(tmp_path: Path) -> None:
    profile = EngineProfile(COST, kv_blocks=7, source={"model": "m"})
    write_profile(profile, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile
    assert read_profile(packaged_profile()).source["steps"] > 1000


@pytest.mark.parametrize("text", ["", "{}", '{"cost": {}}', '{"cost": {"fixed_s": 1}}'])
def test_a_malformed_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InputFileInvalidError, match=r"p\.json"):
        read_profile(tmp_path / "p.json")
