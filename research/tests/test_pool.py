"""Engines on one virtual clock: one queue, and prompts that are handed over with their blocks, or without."""

import numpy as np
import pytest
from pagestream_engine import SchedulerConfig
from pagestream_engine.kv_cache import BlockPool, CacheManager
from pagestream_engine.plan import full_attention
from pagestream_simulator import SettingInvalidError, StepContents, VirtualEngine, VirtualRequest

from research.disaggregation.gpu_steps import H100_SXM, LLAMA_3_1_8B, Roofline
from research.disaggregation.pool import Handover, ReceivedBlocks, VirtualPool

STEP_S = 0.01
BLOCK_SIZE = 16


class Engine:
    """A virtual engine whose steps take STEP_S, and what they computed."""

    def __init__(self, *, receives: bool = False, num_blocks: int = 512) -> None:
        pool = BlockPool(num_blocks)
        tier = ReceivedBlocks(pool, num_blocks) if receives else None
        cache = CacheManager(pool, full_attention(BLOCK_SIZE), enable_prefix_caching=True, tier=tier)
        self.contents: list[StepContents] = []
        self.virtual = VirtualEngine(SchedulerConfig(), cache, lambda step: self.step_s(StepContents.of(step)))

    def step_s(self, contents: StepContents) -> float:
        self.contents.append(contents)
        return STEP_S

    @property
    def prefill_tokens(self) -> int:
        return sum(step.prefill_tokens for step in self.contents)


def split(handover: Handover, decoding: Engine) -> VirtualPool:
    return VirtualPool([Engine().virtual], claim_tokens=2048, decoding=[decoding.virtual], handover=handover)


def drawn_for_pool(count: int) -> list[VirtualRequest]:
    rng = np.random.default_rng(0)
    columns = np.sort(rng.uniform(0, 5.0, count)), rng.integers(1, 700, count), rng.integers(1, 60, count)
    return [VirtualRequest(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def test_a_pool_of_one_engine_serves_as_that_engine_alone() -> None:
    alone, pool = Engine().virtual, VirtualPool([Engine().virtual], claim_tokens=2**40)
    alone.run(drawn_for_pool(100))
    pool.run(drawn_for_pool(100))
    assert pool.first_s == pytest.approx(alone.first_s)
    assert pool.end_s == pytest.approx(alone.end_s)
    assert len(pool.gaps_s) == sum(request.output_tokens - 1 for request in drawn_for_pool(100))


def test_a_prompt_passes_the_links_before_its_second_token_and_only_its_last_tokens_are_computed_again() -> None:
    decoding = Engine(receives=True)
    pool = split(Handover(token_bytes=100, bytes_per_s=1600.0), decoding)
    pool.run([VirtualRequest(0.0, 165, 3), VirtualRequest(0.0, 165, 3)])
    assert pool.first_s == pytest.approx([STEP_S, 2 * STEP_S])
    transfer_s = 10 * BLOCK_SIZE * 100 / 1600.0  # Ten full blocks each, one prompt after the other.
    second_s = [STEP_S + transfer_s + 2 * STEP_S, STEP_S + 2 * transfer_s + 2 * STEP_S]  # A load, a chunk.
    assert sorted(pool.gaps_s)[2:] == pytest.approx(second_s - pool.first_s)
    assert sorted(pool.gaps_s)[:2] == pytest.approx([STEP_S, STEP_S])
    assert decoding.prefill_tokens == 2 * (165 + 1 - 10 * BLOCK_SIZE)


def test_a_prompt_whose_blocks_are_lost_is_computed_again_by_the_decode_engine() -> None:
    decoding = Engine(receives=True)
    pool = split(Handover(token_bytes=100, bytes_per_s=1600.0, lost_share=1.0), decoding)
    pool.run([VirtualRequest(0.0, 165, 3)])
    assert decoding.prefill_tokens == 166
    assert list(pool.gaps_s) == pytest.approx([STEP_S, STEP_S])


def test_a_split_pool_serves_all_where_its_decode_engine_has_too_few_blocks_for_all() -> None:
    decoding = Engine(receives=True, num_blocks=64)
    pool = split(Handover(token_bytes=1, bytes_per_s=1e9), decoding)
    pool.run(drawn_for_pool(100))
    assert np.isfinite(pool.end_s).all()
    assert len(pool.gaps_s) == sum(request.output_tokens - 1 for request in drawn_for_pool(100))
    assert decoding.virtual.scheduler.num_preemptions > 0


def test_decode_engines_without_a_way_to_get_blocks_are_refused() -> None:
    handover = Handover(token_bytes=1, bytes_per_s=1.0)
    with pytest.raises(SettingInvalidError, match="no handover"):
        VirtualPool([Engine().virtual], claim_tokens=1, decoding=[Engine(receives=True).virtual])
    with pytest.raises(SettingInvalidError, match="no tier of ReceivedBlocks"):
        VirtualPool([Engine().virtual], claim_tokens=1, decoding=[Engine().virtual], handover=handover)


def test_a_roofline_reads_weights_for_decodes_and_multiplies_for_prompts() -> None:
    roofline = Roofline(H100_SXM, LLAMA_3_1_8B)
    weights_s = 2 * 7.5e9 / 3.35e12
    assert roofline.seconds(StepContents(0, 0, 1, 0)) == pytest.approx(weights_s)
    assert roofline.seconds(StepContents(64, 0, 1, 0)) == pytest.approx(weights_s)
    assert roofline.seconds(StepContents(8192, 0, 0, 0)) == pytest.approx(8192 * 2 * 7.5e9 / 989.4e12)
    assert roofline.seconds(StepContents(0, 0, 8, 80_000)) == pytest.approx(weights_s + 80_000 * 131_072 / 3.35e12)
    assert roofline.seconds(StepContents(0, 0, 0, 0)) == 0
