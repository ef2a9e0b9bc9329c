"""What the GPU does, where there is one: torch knows its memory, NVIDIA's management library how busy it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuUse:
    """One look at the device."""

    memory_bytes: int
    """In use by whomever."""
    utilization: float | None
    """Share of the last moments in which it computed, in [0, 1]; None where the library is missing."""


def gpu_use() -> GpuUse | None:
    """Look at the current device; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return GpuUse(total - free, _utilization())


def _utilization() -> float | None:
    import torch

    try:
        return float(torch.cuda.utilization()) / 100
    except (ModuleNotFoundError, RuntimeError):  # nvidia-ml-py is not installed, or the driver has no such library
        return None
