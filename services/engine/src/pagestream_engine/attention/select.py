"""Which backend runs where."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pagestream_engine.attention.base import AttentionBackend, CacheShape
from pagestream_engine.attention.native.calls import supports
from pagestream_engine.attention.native.library import load_library
from pagestream_engine.attention.native_backend import NativeBackend
from pagestream_engine.attention.torch_backend import TorchBackend


def select_backend(name: str, shape: CacheShape, cos_sin: Tensor) -> AttentionBackend[Any]:
    """Builds a backend on `cos_sin`'s device.

    Args:
        name: torch, triton, or auto: Triton on a GPU; on a CPU the C++ kernels, or torch where they can't be had (no
            compiler, float16, a head size that is no multiple of 16).
        shape: of the cache.
        cos_sin: as `AttentionBackend` takes it.

    Raises:
        ConfigError: Triton can't run this on this device.
    """
    on_cpu = cos_sin.device.type == "cpu"
    if name == "triton" or (name == "auto" and not on_cpu):
        # Importing the kernels imports Triton: half a second that a CPU's start is spared.
        from pagestream_engine.attention.triton_backend import TritonBackend

        return TritonBackend(shape, cos_sin)
    if name == "auto" and supports(shape.dtype):
        library = load_library(shape.head_dim)
        if library is not None:
            return NativeBackend(shape, cos_sin, library)
    return TorchBackend(shape, cos_sin)
