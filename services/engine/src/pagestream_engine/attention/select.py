"""Which backend runs where."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pagestream_engine.attention.base import AttentionBackend, CacheShape
from pagestream_engine.attention.torch_backend import TorchBackend


def select_backend(name: str, shape: CacheShape, cos_sin: Tensor) -> AttentionBackend[Any]:
    """Builds a backend on `cos_sin`'s device.

    Args:
        name: auto (Triton on a GPU, torch on a CPU), torch or triton.
        shape: of the cache.
        cos_sin: as `AttentionBackend` takes it.

    Raises:
        ConfigError: Triton can't run this on this device.
    """
    if name == "triton" or (name == "auto" and cos_sin.device.type == "cuda"):
        # Importing the kernels imports Triton: half a second that a CPU's start is spared.
        from pagestream_engine.attention.triton_backend import TritonBackend

        return TritonBackend(shape, cos_sin)
    return TorchBackend(shape, cos_sin)
