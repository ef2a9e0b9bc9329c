"""How much memory the cache may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pagestream_engine.errors import ModelTooLarge, OutOfMemory
from pagestream_engine.runner import memory


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
        with memory.step_memory(7, 3):
            torch.empty(1 << 60)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(OutOfMemory), memory.step_memory(7, 3):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    with pytest.raises(RuntimeError, match="shapes"), memory.step_memory(7, 3):
        raise RuntimeError("shapes do not match")
