"""How much memory the cache may take: what is measured before it is allocated, and host memory for evicted blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pagestream_engine import ConfigError, EngineConfig, ModelTooLarge, OutOfMemory
from pagestream_engine.attention import CacheShape, KVStore
from pagestream_engine.plan import full_attention
from pagestream_engine.runner import ModelRunner, memory
from pagestream_engine.runner.backends import block_size_for
from pagestream_engine.runner.host_pages import HostPages
from pagestream_engine.runner.memory import (
    demanding_params,
    estimated_cpu_step_bytes,
    measure_steps,
    measured_allocations,
    profile_plan,
    prompt_lengths,
)
from pagestream_engine.runner.runner import step_memory
from pagestream_engine.transfers import MAX_SLAB_BYTES, slab_pages
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner
from support.engines.tiny_models import VOCAB_SIZE


def _machine(folder: Path, available_kib: int | None, limit: str | None = None, used: int = 0) -> tuple[Path, Path]:
    meminfo, cgroup = folder / "meminfo", folder / "cgroup"
    cgroup.mkdir()
    if available_kib is not None:
        meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n")
    if limit is not None:
        (cgroup / "memory.max").write_text(limit + "\n")
        (cgroup / "memory.current").write_text(f"{used}\n")
    return meminfo, cgroup


@pytest.mark.parametrize(
    ("available_kib", "limit", "used", "expected"),
    [
        (1000, None, 0, 1000 * 1024),
        (1000, "max", 5, 1000 * 1024),
        (1000, "500000", 100000, 400000),
        (1000, "100", 200, 0),
        (None, None, 0, 4 << 30),
    ],
)
def test_available_is_the_lesser_of_machine_and_container(
    tmp_path: Path, available_kib: int | None, limit: str | None, used: int, expected: int
) -> None:
    assert memory.available_bytes(*_machine(tmp_path, available_kib, limit, used)) == expected


@pytest.mark.parametrize(
    ("step", "host", "available", "expected"),
    [
        (100 << 20, 0, 1 << 30, 156 << 20),
        (100 << 20, 512 << 20, 1 << 30, 28 << 20),
        (0, 0, 100 << 30, memory.CPU_LIMIT_BYTES),
        (0, 99 << 30, 100 << 30, 256 << 20),
        (1 << 30, 0, 100 << 30, memory.CPU_LIMIT_BYTES),
        (300 << 20, 0, 1 << 30, 0),
        (0, 2 << 30, 1 << 30, 0),
    ],
)
def test_the_largest_step_and_the_host_pages_come_out_of_a_cpus_memory(
    step: int, host: int, available: int, expected: int
) -> None:
    assert memory.cpu_pool_bytes(step, host, available) == expected


class FakeMemory:
    """A GPU with 1,000 bytes, of which another process has 100 and the weights 300.

    The allocator keeps what it took until it is reset; a step leaves 20 bytes outside of it.
    """

    def __init__(self, steps: list[int]) -> None:
        self.steps = iter(steps)
        self.reserved = self.peak = 300
        self.outside = 0

    def run_step(self) -> None:
        self.peak = self.reserved = max(self.reserved, 300 + next(self.steps))
        self.outside = 20

    def free_and_total(self) -> tuple[int, int]:
        return 1000 - 100 - self.reserved - self.outside, 1000

    def reset_peak(self) -> None:
        self.reserved = self.peak = 300

    def allocated(self) -> int:
        return 300

    def peak_reserved(self) -> int:
        return self.peak


@pytest.mark.parametrize(
    ("steps", "utilization", "expected"),
    [([120, 50], 0.9, 360), ([50, 120], 0.9, 360), ([120, 50], 1.0, 460), ([120, 50], 0.5, 0), ([600], 1.0, 0)],
)
def test_a_gpus_share_holds_for_weights_largest_step_and_pool(
    steps: list[int], utilization: float, expected: int
) -> None:
    device = FakeMemory(steps)
    meter = memory.PeakMeter(device)
    for _ in steps:
        with meter.step():
            device.run_step()
    use = meter.use()
    assert use == memory.MemoryUse(free=580, total=1000, step=max(steps), decode=steps[-1])
    pool = memory.gpu_pool_bytes(use, utilization)
    assert pool == expected
    assert pool == 0 or 100 + 300 + 20 + max(steps) + pool <= 1000 * utilization


def test_recorded_steps_keep_the_memory_of_the_largest_decode_and_some_each() -> None:
    use = memory.MemoryUse(free=10 << 30, total=12 << 30, step=2 << 30, decode=1 << 30)
    assert memory.gpu_pool_bytes(use, 1.0) == 8 << 30
    assert memory.gpu_pool_bytes(use, 1.0, num_graphs=35) == (7 << 30) - 35 * memory.GRAPH_BYTES


def test_weights_that_do_not_fit_are_refused_with_both_sizes() -> None:
    with pytest.raises(
        ModelTooLarge, match=r"given 1048576\.0 GiB of weights, expected at most \d+\.\d GiB.* on cpu; "
    ):
        memory.check_weights_fit(1 << 50, torch.device("cpu"), 0.9)
    memory.check_weights_fit(1 << 10, torch.device("cpu"), 0.9)


def test_what_torch_raises_without_memory_is_out_of_memory_of_the_step() -> None:
    with pytest.raises(OutOfMemory, match=r"a step of 7 tokens and 3 samples: .*can't allocate memory") as caught:
        with step_memory(7, 3):
            torch.empty(1 << 60)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(OutOfMemory), step_memory(7, 3):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    with pytest.raises(RuntimeError, match="shapes"), step_memory(7, 3):
        raise RuntimeError("shapes do not match")


# -- the profile run before the cache is allocated --------------------------------------------------------------------


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


def _runner(folder: Path, **options: int) -> tuple[ModelRunner, EngineConfig]:
    config = EngineConfig.from_options({"deterministic": False, **options})
    runner = ModelRunner(folder, config, torch.device("cpu"))
    runner._backend.store.allocate(1)
    return runner, config


def test_a_gpu_is_measured_in_its_largest_prefill_and_its_longest_decode(llama: Path) -> None:
    runner, config = _runner(llama, max_num_seqs=4, max_num_batched_tokens=64)
    use = measure_steps(runner, config, CountingMemory(), VOCAB_SIZE)
    assert (use.free, use.total, use.step) == (700, 1000, 90)


def test_the_estimate_on_a_cpu_is_what_the_largest_step_allocates(llama: Path) -> None:
    runner, config = _runner(llama, max_num_seqs=128, max_num_batched_tokens=1024)
    estimate = estimated_cpu_step_bytes(runner, config, VOCAB_SIZE)
    params = demanding_params(config, VOCAB_SIZE)
    runner.forget_rows()
    with measured_allocations() as largest:
        runner.execute(profile_plan(prompt_lengths(1024, 128, 511), 0, runner.kv_layout, params))()
    assert largest.num_bytes > 1 << 20
    assert 0.9 * largest.num_bytes <= estimate <= 1.5 * largest.num_bytes


def test_the_pool_is_what_the_step_leaves(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagestream_engine.runner.memory.available_bytes", lambda: 256 << 20)
    runner, _ = _runner(llama, max_num_seqs=256)
    pool_bytes, step_bytes = runner._profile()
    assert pool_bytes == (64 << 20) - step_bytes
    assert runner.profile_num_blocks() == pool_bytes // runner._backend.store.block_bytes


def test_more_blocks_than_memory_are_refused(llama: Path) -> None:
    runner, _ = _runner(llama)
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override: given 10{12}, expected at most \d+, blocks of"):
        runner.allocate_kv_cache(10**12)


# -- host memory for evicted blocks -----------------------------------------------------------------------------------

GIB = 1 << 30


def rounded(num_bytes: int) -> int:
    """What torch takes for pinned memory of this size."""
    return 1 << (num_bytes - 1).bit_length()


@given(num_bytes=st.integers(0, 1 << 38), page_bytes=st.integers(1, 1 << 32))
@example(num_bytes=33 * GIB, page_bytes=131_072)
@example(num_bytes=64 * GIB, page_bytes=80 * 2 * 8 * 64 * 128 * 2)
def test_pinned_pages_take_no_more_than_was_asked_for(num_bytes: int, page_bytes: int) -> None:
    slabs = slab_pages(num_bytes, page_bytes, pinned=True)
    taken = [rounded(count * page_bytes) for count in slabs]
    assert sum(taken) <= num_bytes
    assert all(size <= max(MAX_SLAB_BYTES, rounded(page_bytes)) for size in taken)
    assert num_bytes - sum(slabs) * page_bytes < (len(slabs) + 2) * page_bytes


def test_pages_that_are_not_pinned_are_one_allocation() -> None:
    assert slab_pages(1000, 300, pinned=False) == [3]
    assert slab_pages(299, 300, pinned=False) == []


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_pages_of_all_allocations_keep_what_is_saved(cache_dtype: torch.dtype | None) -> None:
    store = KVStore([CacheShape((0, 1), 3, 8, 1, torch.float32, cache_dtype)], torch.device("cpu"))
    store.allocate(7)
    for part in store.parts:
        part.view(torch.uint8).random_(0, 100)
    expected = [part.clone() for part in store.parts]
    pages = HostPages(store, [4, 2, 1])
    assert len(pages) == 7
    order = [3, 6, 0, 5, 2, 4, 1]
    pages.launch([(block, page) for block, page in enumerate(order)], [])
    for part in store.parts:
        part.zero_()
    pages.launch([], [(block, page) for block, page in enumerate(order)])
    assert all(map(torch.equal, store.parts, expected))


# -- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, "cpu", 16),
        ({}, "cuda", 64),
        ({"attention_backend": "torch"}, "cuda", 16),
        ({"attention_backend": "triton"}, "cpu", 64),  # interpreted
        ({"block_size": 32}, "cuda", 32),
    ],
)
def test_block_size_suits_the_backend(options: dict[str, Any], device: str, expected: int) -> None:
    assert block_size_for(EngineConfig.from_options(options), torch.device(device)) == expected
