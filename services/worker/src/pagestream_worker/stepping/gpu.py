"""Readings of the GPU, in the process that computes on it. A thread takes them: the driver may need milliseconds."""

import sys
import threading

from pagestream_worker.stepping.reports import GpuUse

PERIOD_S = 2.0


def gpu_use() -> GpuUse | None:
    """Read the current device; None without a GPU."""
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


class GpuMonitor:
    """Keeps the latest reading of the device that a loaded engine computes on."""

    def __init__(self) -> None:
        self.latest: GpuUse | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start reading, where the engine has imported torch and there is a GPU."""
        if "torch" not in sys.modules:
            return
        self.latest = gpu_use()
        if self.latest is not None:
            threading.Thread(target=self._read_forever, name="gpu", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()

    def _read_forever(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.latest = gpu_use()
