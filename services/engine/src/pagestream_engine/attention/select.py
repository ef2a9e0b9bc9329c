"""Which backend runs where."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pagestream_engine.attention.base import AttentionBackend, CacheShape
from pagestream_engine.attention.torch_backend import TorchBackend
from pagestream_engine.errors import ConfigError


def select_backend(name: str, shape: CacheShape, cos_sin: Tensor) -> AttentionBackend[Any]:
    """Builds the backend `name` on `cos_sin`'s device; auto is Triton on a GPU and torch on a CPU.

    Raises:
        ConfigError: the backend is unknown, or can't run on this device.
    """
    device = cos_sin.device
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        return TorchBackend(shape, cos_sin)
    if name == "triton":
        from pagestream_engine.attention.triton_backend import TritonBackend, is_interpreted

        if device.type == "cpu" and not is_interpreted():
            raise ConfigError(
                "attention_backend", name, "torch on a CPU", "Triton runs on a CPU only with TRITON_INTERPRET=1"
            )
        return TritonBackend(shape, cos_sin)
    raise ConfigError("attention_backend", name, "auto, torch or triton")
