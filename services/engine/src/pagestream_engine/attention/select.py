"""Which backend runs where.

A backend is a module or a folder here with a `make_backend`, and its name is one of the option `attention_backend`
(`tools/write_options.py` writes the choices). The C++ kernels have no name: a CPU takes them where they can be had.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from pagestream_engine.attention.base import Backend, CacheShape
from pagestream_engine.attention.native.attention import make_native_backend


def prefers_triton(name: str, device: torch.device) -> bool:
    """Whether `select_backend` takes the Triton kernels by this name, or refuses."""
    return name == "triton" or (name == "auto" and device.type != "cpu")


def select_backend(
    name: str, shapes: Sequence[CacheShape], device: torch.device, *, deterministic: bool = False
) -> Backend:
    """Choose and build KV store, attention and operators for a device.

    Args:
        name: of a backend, or auto: Triton on a GPU; on a CPU the C++ kernels, or torch where they can't be had (no
            compiler, a head size that is no multiple of 16).
        shapes: of the cache of each KV group.
        device: that computes.
        deterministic: whether it must be one that `is_deterministic`.

    Raises:
        ConfigError: the backend can't run this on this device, or what runs there is not deterministic.
    """
    if name == "auto" and device.type == "cpu":
        native = make_native_backend(shapes, device)
        if native is not None:
            return native
    if name == "auto":
        name = "triton" if prefers_triton(name, device) else "torch"
    # Importing the kernels imports Triton: half a second that a CPU's start is spared.
    backend: Backend = import_module(f"pagestream_engine.attention.{name}").make_backend(
        shapes, device, deterministic=deterministic
    )
    return backend
