"""The C++ kernels as functions of tensors: pointers and strides are taken here and nowhere else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
Kernel = Callable[..., None]
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def supports(dtype: torch.dtype) -> bool:
    """Whether there are kernels for a dtype."""
    return dtype in _SUFFIXES


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer's cache, and whose blocks are read."""

    keys: Tensor
    """(num_blocks, num_kv_heads, block_size, head_dim) contiguous, as `values`."""
    values: Tensor
    tables: Tensor
    """(sequences, most blocks) int32 contiguous."""
    scale: float


class NativeKernels:
    """The kernels of one library for one dtype. Every tensor is on the CPU."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        """`library` is of the model's head size, `dtype` one that `supports` knows."""

        def bind(name: str, *arguments: type) -> Kernel:
            function: Any = getattr(library, f"{name}_{_SUFFIXES[dtype]}")
            function.argtypes, function.restype = [*arguments, _I], None
            bound: Kernel = function
            return bound

        self._rms_norm = bind("rms_norm", *[_P] * 4, *[_N] * 5, _F)
        self._silu_and_mul = bind("silu_and_mul", *[_P] * 2, *[_N] * 2)
        self._rope_and_cache = bind("rope_and_cache", *[_P] * 8, *[_N] * 7)
        self._decode = bind("decode", *[_P] * 5, *[_N] * 5, _F, _P, _N)
        self._prefill = bind("prefill", *[_P] * 5, *[_N] * 5, _F, _P, _N)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(..., dim) of at most three dimensions -> the same shape, contiguous."""
        rows = x if x.dim() == 3 else x.unsqueeze(0)
        outer, inner, dim = rows.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rms_norm(
            out.data_ptr(),
            rows.data_ptr(),
            None,
            weight.data_ptr(),
            outer,
            inner,
            rows.stride(0),
            rows.stride(1),
            dim,
            eps,
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
            1,
            rows,
            0,
            dim,
            dim,
            eps,
            torch.get_num_threads(),
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """(rows, 2 * dim) contiguous -> (rows, dim)."""
        rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, dim), dtype=gate_up.dtype)
        self._silu_and_mul(out.data_ptr(), gate_up.data_ptr(), rows, dim, torch.get_num_threads())
        return out

    def rope_and_cache(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        places: tuple[Tensor, Tensor],
        cos_sin: Tensor,
        cache: PagedLayer,
    ) -> None:
        """Rotate `query` in place, and write the rotated key and the value to their slots.

        Args:
            query: (tokens, heads, head_dim), a token's heads contiguous; `key` and `value` likewise.
            key: see query.
            value: see query.
            places: position and slot of each token, (tokens,) int64 each.
            cos_sin: (positions, head_dim) float32.
            cache: of the layer.
        """
        self._rope_and_cache(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            places[0].data_ptr(),
            places[1].data_ptr(),
            cos_sin.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            query.shape[0],
            query.shape[1],
            key.shape[1],
            cache.keys.shape[2],
            query.stride(0),
            key.stride(0),
            value.stride(0),
            torch.get_num_threads(),
        )

    def decode(self, out: Tensor, query: Tensor, cache: PagedLayer, seq_lens: Tensor) -> None:
        """One query token for each row of the tables, over `seq_lens` (int64) tokens; `out` is contiguous."""
        self._attend(self._decode, out, query, cache, seq_lens)

    def prefill(self, out: Tensor, query: Tensor, cache: PagedLayer, tiles: Tensor) -> None:
        """Causal attention of query tiles, (tiles, 4) int64: row of the tables, packed row and position of the first
        token, number of tokens."""
        self._attend(self._prefill, out, query, cache, tiles)

    def _attend(self, kernel: Kernel, out: Tensor, query: Tensor, cache: PagedLayer, work: Tensor) -> None:
        _, num_kv_heads, block_size, _ = cache.keys.shape
        kernel(
            out.data_ptr(),
            query.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            cache.tables.data_ptr(),
            cache.tables.stride(0),
            query.shape[1],
            num_kv_heads,
            block_size,
            query.stride(0),
            cache.scale,
            work.data_ptr(),
            work.shape[0],
            torch.get_num_threads(),
        )
