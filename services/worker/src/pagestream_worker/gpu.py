"""Readings of the GPUs that an engine computes on. A thread takes them: the driver may need milliseconds.

An engine of several ranks computes in other processes, each on a GPU of its own. A context that this process opened on
a GPU would take half a gigabyte there, beside the memory that the ranks have counted on. So readings come from NVIDIA's
management library, which opens none, and from CUDA only in a process that computes by it.
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from statistics import fmean

from pagestream_engine.config import EngineConfig
from pagestream_engine.wire.worker import GpuUse

logger = logging.getLogger(__name__)

PERIOD_S = 2.0


def gpus_of(config: EngineConfig) -> Sequence[int]:
    """Return the GPUs that the ranks of this machine have, where they compute on GPUs."""
    if config.model.device == "cpu":
        return ()
    return range(config.parallel.num_ranks // config.parallel.nnodes)


def gpu_use(devices: Sequence[int] = (0,)) -> GpuUse | None:
    """Read devices: their memory together, and how busy they are on average; None without a GPU.

    Args:
        devices: their numbers in this process, as `CUDA_VISIBLE_DEVICES` counts them.
    """
    import torch

    if not devices or not torch.cuda.is_available():
        return None
    used = [_used_bytes(device) for device in devices]
    busy = [_utilization(device) for device in devices]
    known = [each for each in used if each is not None]
    if len(known) < len(used):
        return None
    shares = [each for each in busy if each is not None]
    return GpuUse(sum(known), fmean(shares) if len(shares) == len(busy) else None)


def _used_bytes(device: int) -> int | None:
    """Return the bytes that all processes have of a device; None where nothing says so without a context."""
    import torch

    has_context = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if has_context and device == torch.cuda.current_device():
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    try:
        if torch.version.hip is not None:
            return torch.cuda.device_memory_used(device)
        return _nvml_used_bytes(device)
    except (ImportError, RuntimeError):  # no such library, or the driver has none
        return None


def _nvml_used_bytes(device: int) -> int:
    """By the library itself: `torch.cuda.device_memory_used` of 2.13 opens a context on the current device."""
    pynvml = import_module("pynvml")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = str(device) if visible is None else visible.split(",")[device].strip()
    try:
        pynvml.nvmlInit()
        by_index = pynvml.nvmlDeviceGetHandleByIndex
        handle = by_index(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
        used: int = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    except pynvml.NVMLError as error:
        raise RuntimeError(str(error)) from error
    return used


def _utilization(device: int) -> float | None:
    import torch

    try:
        return float(torch.cuda.utilization(device)) / 100
    except (ImportError, RuntimeError):  # nvidia-ml-py is not installed, or the driver has no such library
        return None
    except Exception as error:  # noqa: BLE001 - the library's own errors; a MIG slice has no such number
        logger.debug("the utilization of GPU %d is not known: %s", device, error)
        return None


class GpuMonitor:
    """Keeps the latest reading of the devices that a loaded engine computes on."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.latest: GpuUse | None = None
        self._devices = devices
        self._stopping = threading.Event()
        self._has_failed = False

    def start(self) -> None:
        """Start reading, where the engine has imported torch and there is a GPU."""
        if "torch" not in sys.modules:
            return
        self._read()
        if self.latest is not None or self._has_failed:
            threading.Thread(target=self._read_forever, name="gpu", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()

    def _read_forever(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._read()

    def _read(self) -> None:
        """Take a reading; there is none where the driver fails, since an old one would mislead."""
        try:
            self.latest = gpu_use(self._devices)
            self._has_failed = False
        except Exception:
            self.latest = None
            if not self._has_failed:
                logger.exception("the GPUs can't be read; trying again every %g s", PERIOD_S)
            self._has_failed = True
