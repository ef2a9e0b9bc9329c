"""How much memory weights, a step and the KV cache may take on this machine."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pagestream_engine.errors import ConfigError, ModelTooLarge, OutOfMemory, UnsupportedOption
from pagestream_engine.features.offload import Copier, CudaCopier, OffloadTarget
from pagestream_engine.models.source import ModelSource
from pagestream_engine.out_of_memory import is_out_of_memory

CPU_SHARE = 0.25
"""Of the memory that is free when the engine starts: a laptop's other programs, and further engines, need the rest."""
CPU_LIMIT_BYTES = 4 << 30
"""Most that the pool takes on a CPU unless `num_gpu_blocks_override` asks for more: 4 GiB hold 174,000 tokens of a
model with 12 layers and 4 KV heads of 64 in bfloat16."""
GRAPH_BYTES = 8 << 20
"""Set aside for each CUDA graph, beside the memory that all of them share, which is that of the largest; not measured
on a GPU yet."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A device's memory between two steps, with the weights loaded and no KV cache, in bytes."""

    free: int
    total: int
    step: int
    """Most that a step takes beside what is allocated between steps."""
    decode: int = 0
    """What the largest step of decodes takes."""


class DeviceMemory(Protocol):
    """Reads a GPU's memory."""

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that no process has taken, and all there are."""
        ...

    def reset_peak(self) -> None:
        """Give back what no tensor needs, and begin to measure the peak."""
        ...

    def allocated(self) -> int:
        """Bytes of this process's tensors."""
        ...

    def peak_reserved(self) -> int:
        """Most bytes that the allocator has held since `reset_peak`, gaps between tensors included."""
        ...


class CudaMemory:
    """The `DeviceMemory` of a GPU of NVIDIA or AMD."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_reserved(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)


class PeakMeter:
    """Measures the largest of several steps by the peak of a GPU's allocator.

    What the steps leave behind outside of the allocator (kernels, workspaces of libraries) counts as taken.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._steps: list[int] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure what runs inside."""
        self._memory.reset_peak()
        before = self._memory.allocated()
        yield
        self._steps.append(self._memory.peak_reserved() - before)

    def use(self) -> MemoryUse:
        """Return what was measured, the last step being the decodes; nothing but the weights may be allocated."""
        self._memory.reset_peak()
        free, total = self._memory.free_and_total()
        return MemoryUse(free, total, max(self._steps), self._steps[-1])


def gpu_pool_bytes(use: MemoryUse, gpu_memory_utilization: float, num_graphs: int = 0) -> int:
    """Bytes for the KV cache of a GPU: weights, the largest step, recorded steps and the cache, with what other
    processes have taken, stay within the share `gpu_memory_utilization` of all its memory."""
    kept = use.step + (use.decode + num_graphs * GRAPH_BYTES if num_graphs else 0)
    return max(0, use.free - kept - (use.total - int(use.total * gpu_memory_utilization)))


def cpu_pool_bytes(step_bytes: int, host_bytes: int = 0, available: int | None = None, *, num_ranks: int = 1) -> int:
    """Bytes for the KV cache in host memory, where the largest step takes `step_bytes` beside it, and pages for evicted
    blocks `host_bytes`. Each of several ranks has its part of the machine and of the limit; the other two are its own.
    """
    available = (available_bytes() if available is None else available) // num_ranks - host_bytes
    return max(0, min(CPU_LIMIT_BYTES // num_ranks, int(available * CPU_SHARE) - step_bytes))


def check_weights_fit(num_bytes: int, device: torch.device, gpu_memory_utilization: float) -> None:
    """Compare a model's weights with the memory that is free now, before they are loaded.

    Raises:
        ModelTooLarge: they do not fit.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free -= total - int(total * gpu_memory_utilization)
    else:
        free = available_bytes()
    if num_bytes > free:
        raise ModelTooLarge(num_bytes, max(0, free), device.type)


def offload_target(
    given_gb: float, source: ModelSource, device: torch.device, copier: Copier | None
) -> OffloadTarget | None:
    """Return how weights are kept in host memory; None where none are.

    Args:
        given_gb: `ModelConfig.cpu_offload_gb`.
        device: that computes.
        copier: in place of a GPU's, on any device.

    Raises:
        UnsupportedOption: the device is a CPU, or the model can't compute with weights that come and go.
        ConfigError: there is less host memory.
    """
    if not given_gb:
        return None
    if copier is None and device.type == "cpu":
        hint = "a CPU computes with the weights where they are, in its own memory"
        raise UnsupportedOption("cpu_offload_gb", given_gb, "0", hint)
    if not source.can_offload:
        hint = f"{source.info.architecture} runs by the code of transformers, whose weights stay on the device"
        raise UnsupportedOption("cpu_offload_gb", given_gb, "0", hint)
    num_bytes, free = int(given_gb * 2**30), available_bytes()
    if num_bytes > free:
        raise ConfigError(
            "cpu_offload_gb", given_gb, f"at most the {free / 2**30:.1f} GiB of host memory that are free"
        )
    return OffloadTarget(num_bytes, CudaCopier(device) if copier is None else copier)


@contextmanager
def step_memory(num_tokens: int, num_samples: int) -> Iterator[None]:
    """Raise what torch raises where memory runs out inside as OutOfMemory of a step of this size."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise OutOfMemory(f"a step of {num_tokens} tokens and {num_samples} samples: {first_line}") from error


def give_back_memory(device: torch.device) -> None:
    """Give the memory that no tensor needs back to the device and to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(AttributeError):  # of another library than glibc, which has no such call
            ctypes.CDLL(None).malloc_trim(0)


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be had without swapping: the machine's, or this container's where that is less."""
    machine = _meminfo_available(meminfo)
    limit, used = _read_int(cgroup / "memory.max"), _read_int(cgroup / "memory.current")
    if limit is None or used is None:
        return machine
    return min(machine, max(0, limit - used))


def _meminfo_available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    # No Linux: enough for small models anywhere, and never a guess that swaps.
    return 4 << 30


def _read_int(path: Path) -> int | None:
    """A number from a one-line file; None where there is none, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
