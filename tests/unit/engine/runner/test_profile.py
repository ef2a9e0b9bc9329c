"""The profile run before the KV cache is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pagestream_engine.cache.kv_groups import full_attention
from pagestream_engine.config import EngineConfig
from pagestream_engine.runner import ModelRunner
from pagestream_engine.runner.allocations import measured_allocations
from pagestream_engine.runner.profile import (
    demanding_params,
    estimated_cpu_step_bytes,
    measure_steps,
    profile_plan,
    prompt_lengths,
)
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner
from support.engines.tiny_models import VOCAB_SIZE, make_model


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "longest", "expected"),
    [
        (2048, 1, 4096, [2048]),
        (2048, 1, 100, [100]),
        (10, 4, 100, [7, 1, 1, 1]),
        (10, 4, 4, [4, 4, 1, 1]),
        (10, 2, 4, [4, 4]),
        (4, 4, 100, [1, 1, 1, 1]),
        (3, 8, 100, [1, 1, 1]),
    ],
)
def test_the_largest_prefill_has_all_tokens_and_all_samples(
    num_tokens: int, num_seqs: int, longest: int, expected: list[int]
) -> None:
    assert prompt_lengths(num_tokens, num_seqs, longest) == expected


def test_a_plan_of_the_profile_is_a_step_within_the_limits() -> None:
    config = EngineConfig.from_options({"max_num_seqs": 4, "max_num_batched_tokens": 50, "block_size": 4})
    runner = ArithmeticRunner(config, ArithmeticFacts())
    params = demanding_params(config, 47)
    for lengths, num_computed in ((prompt_lengths(50, 4, 4095), 0), ([1] * 4, 4094)):
        plan = profile_plan(lengths, num_computed, full_attention(4), params)
        runner.rows.clear()
        runner.edit(plan)
        runner._check_limits(plan)
        assert len(plan.sampled_rows) == 4


class CountingMemory:
    """The tensors of a CPU, as a reader of a GPU's memory sees its own."""

    def __init__(self) -> None:
        self.num_resets = 0

    def free_and_total(self) -> tuple[int, int]:
        return 700, 1000

    def reset_peak(self) -> None:
        self.num_resets += 1

    def allocated(self) -> int:
        return 100

    def peak_reserved(self) -> int:
        return {1: 130, 2: 190}[self.num_resets]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def _runner(folder: Path, **options: int) -> tuple[ModelRunner, EngineConfig]:
    config = EngineConfig.from_options({"deterministic": False, **options})
    runner = ModelRunner(folder, config, torch.device("cpu"))
    runner._backend.store.allocate(1)
    return runner, config


def test_a_gpu_is_measured_in_its_largest_prefill_and_its_longest_decode(folder: Path) -> None:
    runner, config = _runner(folder, max_num_seqs=4, max_num_batched_tokens=64)
    use = measure_steps(runner, config, CountingMemory(), VOCAB_SIZE)
    assert (use.free, use.total, use.step) == (700, 1000, 90)


def test_the_estimate_on_a_cpu_is_what_the_largest_step_allocates(folder: Path) -> None:
    runner, config = _runner(folder, max_num_seqs=128, max_num_batched_tokens=1024)
    estimate = estimated_cpu_step_bytes(runner, config, VOCAB_SIZE)
    params = demanding_params(config, VOCAB_SIZE)
    runner.forget_rows()
    with measured_allocations() as largest:
        runner.execute(profile_plan(prompt_lengths(1024, 128, 511), 0, runner.kv_layout, params))()
    assert largest.num_bytes > 1 << 20
    assert 0.9 * largest.num_bytes <= estimate <= 1.5 * largest.num_bytes


def test_the_pool_is_what_the_step_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagestream_engine.runner.memory.available_bytes", lambda: 256 << 20)
    runner, _ = _runner(folder, max_num_seqs=256)
    pool_bytes, step_bytes = runner._profile()
    assert pool_bytes == (64 << 20) - step_bytes
    assert runner.profile_num_blocks() == pool_bytes // runner._backend.store.block_bytes


def test_more_blocks_than_memory_are_refused(folder: Path) -> None:
    from pagestream_engine.errors import ConfigError

    runner, _ = _runner(folder)
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override: given 10{12}, expected at most \d+, blocks of"):
        runner.allocate_kv_cache(10**12)
