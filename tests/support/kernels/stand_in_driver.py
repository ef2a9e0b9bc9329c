"""A driver for a GPU that is not there: Triton compiles for it and launches by all of its Python, up to the C function
that gives a kernel to CUDA, in whose place a call is noted or dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pagestream_kernels.aot import Target
from pagestream_kernels.prebuild import AbsentGPU
from triton.backends.nvidia.driver import CudaLauncher

SHARED_BYTES = 228 << 10
DriverCall = Callable[..., None]
"""Gets what `cuda_utils.launch` gets: see `CudaLauncher.__call__`."""


class StandInDriver(AbsentGPU):
    """An absent GPU that also "loads" and "launches" what was compiled for it."""

    def __init__(self, target: Target, launch: DriverCall) -> None:
        super().__init__(target, 0)
        self.utils = _Utils()
        self._launch = launch

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, source: Any, metadata: Any) -> _Launcher:
        return _Launcher(metadata, self._launch)


class _Utils:
    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}

    def load_binary(self, name: str, *_: Any) -> tuple[object, str, int, int, int]:
        return object(), name, 0, 0, 1024


class _Launcher(CudaLauncher):  # type: ignore[misc]
    """Triton's own, without the argument descriptions, which its C function reads."""

    def __init__(self, metadata: Any, launch: DriverCall) -> None:
        self.arg_annotations = self.kernel_signature = None
        self.num_ctas = metadata.num_ctas
        self.launch = launch
        self.global_scratch_size = metadata.global_scratch_size
        self.global_scratch_align = metadata.global_scratch_align
        self.profile_scratch_size = metadata.profile_scratch_size
        self.profile_scratch_align = metadata.profile_scratch_align
        self.launch_cooperative_grid = metadata.launch_cooperative_grid
        self.launch_pdl = metadata.launch_pdl
