"""Which backend runs where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pagestream_engine.attention.base import Backend, CacheShape, KVStore
from pagestream_engine.attention.native.attention import (
    NativeAttention,
    NativeKernels,
    NativeKVStore,
    NativeOperators,
    load_library,
    supports,
)
from pagestream_engine.attention.torch import (
    DeterministicTorchAttention,
    DeterministicTorchOperators,
    TorchAttention,
    TorchOperators,
)
from pagestream_engine.errors import ConfigError
from pagestream_engine.native_build import toolchain_of

_NOT_BY_TORCH = (
    "the order in which torch adds up there depends on the sizes of a step; with the Triton kernels a GPU computes "
    "deterministically"
)


def prefers_triton(name: str, device: torch.device) -> bool:
    """Whether `select_backend` takes the Triton kernels by this name, or refuses."""
    return name == "triton" or (name == "auto" and device.type != "cpu")


def select_backend(
    name: str, shapes: Sequence[CacheShape], device: torch.device, *, deterministic: bool = False
) -> Backend:
    """Choose and build KV store, attention and operators for a device.

    Args:
        name: torch, triton, or auto: Triton on a GPU; on a CPU the C++ kernels, or torch where they can't be had (no
            compiler, a head size that is no multiple of 16).
        shapes: of the cache of each KV group.
        device: that computes.
        deterministic: whether it must be one that `is_deterministic`.

    Raises:
        ConfigError: Triton can't run this on this device, or what runs there is not deterministic.
    """
    if prefers_triton(name, device):
        return _triton(shapes, device, deterministic=deterministic)
    if deterministic and device.type != "cpu":
        raise ConfigError("deterministic", True, "False or None with attention by torch on a GPU", _NOT_BY_TORCH)
    native = _native(shapes, device) if name == "auto" else None
    return native or torch_backend(shapes, device, deterministic=deterministic)


def torch_backend(shapes: Sequence[CacheShape], device: torch.device, *, deterministic: bool) -> Backend:
    """Build the backend of torch's operations."""
    store, dtype = KVStore(shapes, device), shapes[0].dtype
    if deterministic:
        return Backend(
            "deterministic torch", store, DeterministicTorchAttention(store), DeterministicTorchOperators(dtype)
        )
    return Backend("torch", store, TorchAttention(store), TorchOperators(dtype))


def _native(shapes: Sequence[CacheShape], device: torch.device) -> Backend | None:
    """Build the backend of the C++ kernels; None where they can't be had."""
    dtype = shapes[0].dtype
    if not supports(dtype):
        return None
    kernels: dict[int, NativeKernels] = {}
    versions = []
    for head_dim in sorted({shape.head_dim for shape in shapes}):
        library = load_library(head_dim, shapes[0].cache_dtype)
        if library is None:
            return None
        kernels[head_dim] = NativeKernels(library, dtype)
        versions.append(toolchain_of(Path(library._name)))
    store = NativeKVStore(shapes, device, kernels)
    operators = NativeOperators(dtype, next(iter(kernels.values())))
    return Backend("native", store, NativeAttention(store, kernels), operators, " ".join(versions))


def _triton(shapes: Sequence[CacheShape], device: torch.device, *, deterministic: bool) -> Backend:
    # Importing the kernels imports Triton: half a second that a CPU's start is spared.
    import triton
    from pagestream_kernels.launcher import compilations
    from pagestream_kernels.prebuild import take_prebuilt
    from triton.errors import TritonError

    from pagestream_engine.attention.triton import (
        DeterministicTritonAttention,
        DeterministicTritonOperators,
        TritonAttention,
        TritonKVStore,
        TritonOperators,
        check_supported,
    )

    check_supported(shapes, device)
    store, dtype = TritonKVStore(shapes, device), shapes[0].dtype
    attention: TritonAttention = TritonAttention(store)
    operators = TritonOperators(dtype)
    if deterministic:
        attention, operators = DeterministicTritonAttention(store), DeterministicTritonOperators(dtype)
    backend = Backend("triton", store, attention, operators, f"triton {triton.__version__}")
    if device.type == "cpu":  # interpreted
        return backend
    take_prebuilt()
    return replace(backend, num_compilations=lambda: compilations.count, compile_errors=(TritonError,))
