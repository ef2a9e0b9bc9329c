"""Which backend runs where."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pagestream_engine.attention.base import AttentionBackend, CacheShape
from pagestream_engine.attention.exact_torch_backend import ExactTorchBackend
from pagestream_engine.attention.native.calls import supports
from pagestream_engine.attention.native.library import load_library
from pagestream_engine.attention.native_backend import NativeBackend
from pagestream_engine.attention.torch_backend import TorchBackend
from pagestream_engine.errors import ConfigError

_NOT_ON_A_GPU = (
    "there the decode kernel is split by what else is in the batch, prefill adds in another order than decode, and no "
    "row counts of the linears have been compared; set device to cpu and attention_backend to auto"
)


def select_backend(name: str, shape: CacheShape, cos_sin: Tensor, *, exact: bool = False) -> AttentionBackend[Any]:
    """Build a backend on `cos_sin`'s device.

    Args:
        name: torch, triton, or auto: Triton on a GPU; on a CPU the C++ kernels, or torch where they can't be had (no
            compiler, float16, a head size that is no multiple of 16).
        shape: of the cache.
        cos_sin: as `AttentionBackend` takes it.
        exact: whether it must be one that `is_exact`.

    Raises:
        ConfigError: Triton can't run this on this device, or not exactly.
    """
    on_cpu = cos_sin.device.type == "cpu"
    if exact and (name == "triton" or not on_cpu):
        raise ConfigError("deterministic", True, "False or None with Triton and on a GPU", _NOT_ON_A_GPU)
    if name == "triton" or (name == "auto" and not on_cpu):
        # Importing the kernels imports Triton: half a second that a CPU's start is spared.
        from pagestream_kernels.prebuild import take_prebuilt

        from pagestream_engine.attention.triton_backend import TritonBackend

        if not on_cpu:
            take_prebuilt()
        return TritonBackend(shape, cos_sin)
    if name == "auto" and supports(shape.dtype):
        library = load_library(shape.head_dim)
        if library is not None:
            return NativeBackend(shape, cos_sin, library)
    return ExactTorchBackend(shape, cos_sin) if exact else TorchBackend(shape, cos_sin)
