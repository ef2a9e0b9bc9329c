"""The CPU's fast path: attention, KV store, norms, activations and rotation by the C++ kernels for a head size.

`NativeKernels` has the kernels as functions of tensors: pointers and strides are taken there and nowhere else. Compiled
at first use, the code may use every instruction of the CPU it runs on, for the head size of the model; that takes a few
seconds, once. An image without a compiler brings libraries that were compiled beforehand (`levels.py`). Without either
the engine runs on torch's operations, which is several times slower.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagestream_engine.attention.base import (
    Activation,
    Angles,
    Attention,
    AttentionBatch,
    AttentionSpec,
    Backend,
    CacheShape,
    HeadNorm,
    KVStore,
    LayerCache,
    LayerScales,
    Rotation,
)
from pagestream_engine.attention.native.levels import NATIVE, find_prebuilt, library_for
from pagestream_engine.attention.torch import DeterministicTorchOperators
from pagestream_engine.errors import NativeBuildError
from pagestream_engine.native_build import cached, toolchain_of

Int64Array = npt.NDArray[np.int64]

_TILE_TOKENS = 16
"""Query tokens that share each key and value that was widened: with a group of 3, 48 rows to one transposition."""


def make_native_backend(shapes: Sequence[CacheShape], device: torch.device) -> Backend | None:
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


@dataclass(frozen=True, slots=True)
class NativeMetadata:
    """What all layers of a KV group share in a step."""

    tables: Tensor
    """(rows, most blocks) int32."""
    tiles: Tensor
    """(tiles, 4) int64: see `NativeKernels.attend`."""


class NativeAttention(Attention[NativeMetadata]):
    """One call for a layer: chunks of prompts, and decodes, whose tiles have one token."""

    is_deterministic = True

    def __init__(self, store: KVStore, kernels: Mapping[int, NativeKernels]) -> None:
        """`kernels` are by head size."""
        super().__init__(store)
        self._kernels = kernels

    def prepare(self, batch: AttentionBatch, block_size: int) -> NativeMetadata:
        tiles = _tiles(
            batch.table_rows.numpy(), np.array(batch.query_lens, np.int64), np.array(batch.seq_lens, np.int64)
        )
        return NativeMetadata(batch.block_tables, torch.from_numpy(tiles))

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, metadata: NativeMetadata) -> Tensor:
        query = with_contiguous_heads(query)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        paged = PagedLayer(self.store.layers[layer], metadata.tables, spec, self.store.scales.get(layer))
        self._kernels[spec.head_dim].attend(output, query, paged, metadata.tiles)
        return output.view(query.shape[0], -1)


def _tiles(table_rows: Int64Array, query_lens: Int64Array, seq_lens: Int64Array) -> Int64Array:
    """Cut each chunk into tiles; the last tiles of a sequence, which see the most, come first in it."""
    counts = -(-query_lens // _TILE_TOKENS)
    seqs = np.repeat(np.arange(len(counts)), counts)
    ends = counts.cumsum()
    first = (ends[seqs] - np.arange(len(seqs)) - 1) * _TILE_TOKENS
    rows = query_lens.cumsum() - query_lens
    return np.stack(
        (
            table_rows[seqs],
            rows[seqs] + first,
            (seq_lens - query_lens)[seqs] + first,
            np.minimum(_TILE_TOKENS, query_lens[seqs] - first),
        ),
        axis=1,
    )


class NativeKVStore(KVStore):
    """Norms, rotates and writes in one pass."""

    def __init__(
        self, shapes: Sequence[CacheShape], device: torch.device, kernels: Mapping[int, NativeKernels]
    ) -> None:
        """`kernels` are by head size."""
        super().__init__(shapes, device)
        self._kernels = kernels

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        key, value = with_contiguous_heads(key), with_contiguous_heads(value)
        to = Write(self.layers[layer], slots, scales=self.scales.get(layer))
        self._kernels[key.shape[2]].rope_and_cache(key, key, value, to)

    def rotates(self, rotation: Rotation, head_dim: int, norm: HeadNorm | None) -> bool:
        return rotation.rotary_dim <= head_dim

    def rotate_and_write(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        slots: Tensor,
        angles: Angles,
        norm: HeadNorm | None,
    ) -> Tensor:
        query, key, value = with_contiguous_heads(query), with_contiguous_heads(key), with_contiguous_heads(value)
        to = Write(self.layers[layer], slots, angles.positions, angles.rotation, self.scales.get(layer), norm)
        self._kernels[key.shape[2]].rope_and_cache(query, key, value, to)
        return query


class NativeOperators(DeterministicTorchOperators):
    """The C++ kernels, and deterministic torch operations for what is rare."""

    def __init__(self, dtype: torch.dtype, kernels: NativeKernels) -> None:
        """`kernels` are of any head size."""
        super().__init__(dtype)
        self._kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._kernels.add_rms_norm(x, residual, weight, eps), residual

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.gate_and_mul("silu_and_mul", gate_up)

    def gelu_and_mul(self, gate_up: Tensor, *, tanh: bool) -> Tensor:
        return self._kernels.gate_and_mul("gelu_tanh_and_mul" if tanh else "gelu_and_mul", gate_up)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._kernels.layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._kernels.layer_norm(x, weight, bias, eps, residual=residual), residual

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return self._kernels.activate(x, activation)

    def angles(self, rotation: Rotation, positions: Tensor) -> Angles:
        # The store looks them up in the rotation's table as it writes.
        return Angles(rotation, positions)

    def rotate(self, query: Tensor, key: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        return super().rotate(query, key, super().angles(angles.rotation, angles.positions))


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
    """Its sinks and slopes, if any, float32 on the CPU and contiguous."""
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
        self._layer_norm = bind("layer_norm", *[_P] * 5, _F, *[_N] * 6)
        self._activate = {name: bind(name, *[_P] * 2, *[_N] * 2) for name in ("silu", "gelu", "gelu_tanh")}
        self._rope_and_cache = bind("rope_and_cache", *[_P] * 7, _B, _F, _P, _N, _B, *[_P] * 4, *[_N] * 9)
        self._attention = bind("attention", *[_P] * 6, _N, _P, *[_N] * 6, _F, _F, _N, *[_P] * 2, _B, _P, _N)

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

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
    ) -> Tensor:
        """As `Operators.layer_norm`; a residual, contiguous as x, has x added in place before."""
        rows = x if x.dim() == 3 else x.unsqueeze(0)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        outer, inner, dim = rows.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        self._layer_norm(
            out.data_ptr(),
            rows.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            eps,
            outer,
            inner,
            rows.stride(0),
            rows.stride(1),
            dim,
            0 if weight.dim() == 1 else dim,
            torch.get_num_threads(),
        )
        return out

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """Apply an activation to (rows, dim) contiguous, in place."""
        self._activate[activation](x.data_ptr(), x.data_ptr(), *x.shape, torch.get_num_threads())
        return x

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
            None if spec.slopes is None else spec.slopes.data_ptr(),
            spec.rounds_slopes,
            tiles.data_ptr(),
            tiles.shape[0],
            torch.get_num_threads(),
        )


def _scale_arguments(scales: LayerScales | None) -> tuple[int | None, int | None, int]:
    """Pointers to scales, and the distance of their rows."""
    if scales is None:
        return None, None, 0
    return scales.keys.data_ptr(), scales.values.data_ptr(), scales.keys.stride(0)


HEAD_DIM_MULTIPLE = 16
_CACHES = {None: "", torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16"}
"""What keys and values are kept as, where it is not the model's dtype, by its name in the C++ source."""

_log = logging.getLogger(__name__)


@cache
def load_library(head_dim: int, cache_dtype: torch.dtype | None = None) -> ctypes.CDLL | None:
    """Load the library for a head size and a dtype of the cache, None being the model's, compiled if need be; return
    None (and log one warning) where that fails."""
    name = _CACHES[cache_dtype]
    if head_dim % HEAD_DIM_MULTIPLE:
        return None
    try:
        path = find_prebuilt(head_dim, name) or cached(library_for(head_dim, NATIVE, name))
        # Torch is loaded by now, so that the OpenMP runtime that this resolves to is torch's own: one pool of threads.
        return ctypes.CDLL(str(path))
    except (OSError, NativeBuildError) as error:
        _log.warning("the C++ kernels can't be used, attention runs on torch's operations, slower: %s", error)
        return None
