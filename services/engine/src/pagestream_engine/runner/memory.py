"""How many KV blocks fit on this machine."""

from __future__ import annotations

from pathlib import Path

import torch

CPU_SHARE = 0.25
"""Of the memory that is free when the engine starts: a laptop's other programs, and further engines, need the rest."""
CPU_LIMIT_BYTES = 4 << 30
"""Most that is taken on a CPU unless `num_gpu_blocks_override` asks for more: 4 GiB hold 174,000 tokens of a model with
12 layers and 4 KV heads of 64 in bfloat16."""
GPU_RESERVE_BYTES = 512 << 20
"""Left free beside the share that was asked for: activations of one step, and what kernels allocate."""


def cache_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes that the KV cache may take on `device` now, the weights being loaded."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, free - GPU_RESERVE_BYTES - int(total * (1 - gpu_memory_utilization)))
    return min(CPU_LIMIT_BYTES, int(available_bytes() * CPU_SHARE))


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
