"""The C++ kernels as functions of tensors: pointers and strides are taken here and nowhere else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagestream_engine.attention.base import AttentionSpec
from pagestream_engine.attention.kv_store import LayerCache, LayerScales
from pagestream_engine.attention.operators import HeadNorm, Rotation

_P, _N, _F, _I, _B = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int, ctypes.c_bool
_NO_WINDOW = (1 << 63) - 1
Kernel = Callable[..., None]
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def supports(dtype: torch.dtype) -> bool:
    """Whether there are kernels for a dtype."""
    return dtype in _SUFFIXES


def with_contiguous_heads(x: Tensor) -> Tensor:
    """(tokens, heads, head_dim): as given if a token's heads lie side by side, else a copy for which that holds."""
    _, of_head, of_element = x.stride()
    return x if of_element == 1 and of_head == x.shape[2] else x.contiguous()


class Write(NamedTuple):
    """Where a step's keys and values go."""

    cache: LayerCache
    slots: Tensor
    """(tokens,) int64."""
    positions: Tensor | None = None
    """(tokens,) int64; needed by a rotation."""
    rotation: Rotation | None = None
    """Of query and key, on the way."""
    scales: LayerScales | None = None
    """Of a cache of float8."""
    norm: HeadNorm | None = None
    """Of query and key before a rotation."""


class PagedLayer(NamedTuple):
    """What one layer's attention reads."""

    cache: LayerCache
    tables: Tensor
    """(rows, most blocks) int32, rows contiguous."""
    spec: AttentionSpec
    """Its sinks, if any, float32 on the CPU and contiguous."""
    scales: LayerScales | None = None
    """Of a cache of float8."""


class NativeKernels:
    """The kernels of one library for one dtype of queries. Every tensor is on the CPU."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        """`library` is of the model's head size and of the cache's dtype, `dtype` one that `supports` knows."""

        def bind(name: str, *arguments: type) -> Kernel:
            function: Any = getattr(library, f"{name}_{_SUFFIXES[dtype]}")
            function.argtypes, function.restype = [*arguments, _I], None
            bound: Kernel = function
            return bound

        self._rms_norm = bind("rms_norm", *[_P] * 4, _B, _F, *[_N] * 5)
        gated = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
        self._gated = {name: bind(name, *[_P] * 2, *[_N] * 2) for name in gated}
        self._rope_and_cache = bind("rope_and_cache", *[_P] * 7, _B, _F, _P, _N, _B, *[_P] * 4, *[_N] * 9)
        self._attention = bind("attention", *[_P] * 6, _N, _P, *[_N] * 6, _F, _F, _N, _P, _P, _N)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(..., dim) of at most three dimensions -> the same shape, contiguous; `weight` is x's dtype or float32."""
        rows = x if x.dim() == 3 else x.unsqueeze(0)
        outer, inner, dim = rows.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rms_norm(
            out.data_ptr(),
            rows.data_ptr(),
            None,
            weight.data_ptr(),
            weight.dtype != x.dtype,
            eps,
            outer,
            inner,
            rows.stride(0),
            rows.stride(1),
            dim,
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x` to `residual` in place, and return the norm of the sum; (rows, dim) contiguous."""
        rows, dim = x.shape
        out = torch.empty_like(x)
        self._rms_norm(
            out.data_ptr(),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            weight.dtype != x.dtype,
            eps,
            1,
            rows,
            0,
            dim,
            dim,
            torch.get_num_threads(),
        )
        return out

    def gate_and_mul(self, kernel: str, gate_up: Tensor) -> Tensor:
        """(rows, 2 * dim) contiguous -> (rows, dim), by silu_and_mul, gelu_and_mul or gelu_tanh_and_mul."""
        rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, dim), dtype=gate_up.dtype)
        self._gated[kernel](out.data_ptr(), gate_up.data_ptr(), rows, dim, torch.get_num_threads())
        return out

    def rope_and_cache(self, query: Tensor, key: Tensor, value: Tensor, to: Write) -> None:
        """Norm and rotate `query` in place, and write key, treated alike, and value; without a rotation write alone.

        Args:
            query: (tokens, heads, head_dim), a token's heads contiguous; `key` and `value` likewise.
        """
        keys, values = to.cache
        norm = to.norm
        self._rope_and_cache(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            None if to.positions is None else to.positions.data_ptr(),
            to.slots.data_ptr(),
            None if norm is None else norm.query_weight.data_ptr(),
            None if norm is None else norm.key_weight.data_ptr(),
            norm is not None and norm.query_weight.dtype != query.dtype,
            0.0 if norm is None else norm.eps,
            None if to.rotation is None else to.rotation.cos_sin.data_ptr(),
            0 if to.rotation is None else to.rotation.rotary_dim,
            to.rotation is not None and to.rotation.interleaved,
            keys.data_ptr(),
            values.data_ptr(),
            *_scale_arguments(to.scales),
            query.shape[0],
            query.shape[1],
            key.shape[1],
            keys.shape[2],
            keys.stride(0),
            query.stride(0),
            key.stride(0),
            value.stride(0),
            torch.get_num_threads(),
        )

    def attend(self, out: Tensor, query: Tensor, layer: PagedLayer, tiles: Tensor) -> None:
        """Causal attention of query tiles, (tiles, 4) int64: row of the tables, packed row and position of the first
        token, number of tokens. `out` is contiguous.
        """
        keys, spec = layer.cache.keys, layer.spec
        self._attention(
            out.data_ptr(),
            query.data_ptr(),
            keys.data_ptr(),
            layer.cache.values.data_ptr(),
            *_scale_arguments(layer.scales),
            layer.tables.data_ptr(),
            layer.tables.stride(0),
            query.shape[1],
            keys.shape[1],
            keys.shape[2],
            keys.stride(0),
            query.stride(0),
            spec.scale,
            spec.soft_cap or 0.0,
            spec.window or _NO_WINDOW,
            None if spec.sinks is None else spec.sinks.data_ptr(),
            tiles.data_ptr(),
            tiles.shape[0],
            torch.get_num_threads(),
        )


def _scale_arguments(scales: LayerScales | None) -> tuple[int | None, int | None, int]:
    """Pointers to scales, and the distance of their rows."""
    if scales is None:
        return None, None, 0
    return scales.keys.data_ptr(), scales.values.data_ptr(), scales.keys.stride(0)
