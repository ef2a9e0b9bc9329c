"""What a worker reads of GPUs opens no context on one where it does not compute itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from pagestream_engine import EngineConfig
from pagestream_worker import gpu
from pagestream_worker.gpu import GpuMonitor, gpu_use, gpus_of
from support.processes.waiting import wait_until

pytestmark = pytest.mark.served
USED = {0: 5 << 30, 1: 7 << 30, 3: 11 << 30}


class _NVMLError(Exception):
    pass


def _library() -> Any:
    """NVIDIA's management library, of a machine with four GPUs of which one has no reading."""

    def used(handle: int) -> SimpleNamespace:
        if handle not in USED:
            raise _NVMLError("it is lost")
        return SimpleNamespace(used=USED[handle])

    return SimpleNamespace(
        NVMLError=_NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: int(name.removeprefix("GPU-")),
        nvmlDeviceGetMemoryInfo=used,
    )


def _opens_a_context(*_: object) -> NoReturn:
    raise AssertionError("this call opens a context")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has imported torch on a machine with GPUs, and has not computed on one."""
    for name in ("current_device", "mem_get_info", "device_memory_used", "set_device"):
        monkeypatch.setattr(torch.cuda, name, _opens_a_context)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: {0: 50, 1: 100, 2: 0}[device])
    monkeypatch.setitem(sys.modules, "pynvml", _library())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_gpus_of_ranks_are_read_without_a_context(cuda: pytest.MonkeyPatch) -> None:
    monitor = GpuMonitor(gpus_of(EngineConfig.from_options({"tensor_parallel_size": 2, "device": "cuda"})))
    monitor.start()
    monitor.stop()
    assert monitor.latest is not None
    assert (monitor.latest.memory_bytes, monitor.latest.utilization) == (12 << 30, 0.75)


@pytest.mark.parametrize("visible", ["0,3", "GPU-0, GPU-3"])
def test_devices_are_counted_as_cuda_counts_them(cuda: pytest.MonkeyPatch, visible: str) -> None:
    cuda.setenv("CUDA_VISIBLE_DEVICES", visible)
    use = gpu_use((0, 1))
    assert use is not None
    assert use.memory_bytes == 16 << 30


def test_without_the_library_nothing_is_read(cuda: pytest.MonkeyPatch) -> None:
    assert gpu_use((0, 2)) is None
    cuda.setitem(sys.modules, "pynvml", None)
    assert gpu_use((0, 1)) is None


def test_a_process_that_computes_reads_its_own_context(cuda: pytest.MonkeyPatch) -> None:
    cuda.setitem(sys.modules, "pynvml", None)
    cuda.setattr(torch.cuda, "is_initialized", lambda: True)
    cuda.setattr(torch.cuda, "current_device", lambda: 0)
    cuda.setattr(torch.cuda, "mem_get_info", {0: (30, 100)}.__getitem__)
    use = gpu_use()
    assert use is not None
    assert use.memory_bytes == 70


def test_an_engine_on_a_cpu_reads_no_gpu(cuda: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_options({"tensor_parallel_size": 2, "device": "cpu"})
    assert gpu_use(gpus_of(config)) is None


def test_a_driver_that_fails_is_read_again(cuda: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its last reading is shown no longer, and the thread that reads doesn't end."""

    def fails() -> NoReturn:
        raise ValueError("the driver is being replaced")

    cuda.setattr(gpu, "PERIOD_S", 0.01)
    monitor = GpuMonitor((0,))
    monitor.start()
    try:
        assert monitor.latest is not None
        cuda.setattr(torch.cuda, "is_available", fails)
        wait_until(lambda: monitor.latest is None, "no reading")
        cuda.setattr(torch.cuda, "is_available", lambda: True)
        wait_until(lambda: monitor.latest is not None, "a reading again")
    finally:
        monitor.stop()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_slice_of_a_gpu_has_no_utilization(cuda: pytest.MonkeyPatch) -> None:
    def not_supported(_: int) -> NoReturn:
        raise _NVMLError("Not Supported")

    cuda.setattr(torch.cuda, "utilization", not_supported)
    use = gpu_use((0,))
    assert use is not None
    assert use.utilization is None
