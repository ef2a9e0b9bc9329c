"""Attention by the C++ kernels: the CPU's fast path."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pagestream_engine.attention.base import AttentionBackend, AttentionBatch, CacheShape
from pagestream_engine.attention.native.calls import NativeKernels, PagedLayer
from pagestream_engine.native_build import toolchain_of

_TILE_TOKENS = 16
"""Query tokens that share each key and value that was widened: with a group of 3, 48 rows to one transposition."""


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What all layers of a step share."""

    places: tuple[Tensor, Tensor]
    """Position and slot of each packed token."""
    tables: Tensor
    """(sequences, most blocks) int32."""
    num_prefills: int
    num_prefill_tokens: int
    tiles: Tensor
    """(tiles, 4) int64: see `NativeKernels.prefill`."""
    decode_lens: Tensor
    """(decodes,) int64."""


class NativeBackend(AttentionBackend[NativePlan]):
    """One call for a layer's rotation and cache write, one for its decodes, one for its prefill tiles."""

    is_exact = True

    def __init__(self, shape: CacheShape, cos_sin: Tensor, library: ctypes.CDLL) -> None:
        """`library` is `load_library(shape.head_dim)`."""
        super().__init__(shape, cos_sin)
        self._kernels = NativeKernels(library, shape.dtype)
        self._library_path = Path(library._name)

    @property
    def kernel_version(self) -> str:
        """Head size, instruction level, and a digest of compiler, flags and processor."""
        return toolchain_of(self._library_path)

    def plan(self, batch: AttentionBatch) -> NativePlan:
        count = batch.num_prefills
        return NativePlan(
            places=(batch.positions, batch.slots),
            tables=batch.block_tables,
            num_prefills=count,
            num_prefill_tokens=batch.num_prefill_tokens,
            tiles=_tiles(batch.query_lens[:count], batch.seq_lens[:count]),
            decode_lens=torch.tensor(batch.seq_lens[count:], dtype=torch.int64),
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: NativePlan) -> Tensor:
        keys, values = self.key_cache[layer], self.value_cache[layer]
        cache = PagedLayer(keys, values, plan.tables, self.scale)
        self._kernels.rope_and_cache(query, key, value, places=plan.places, cos_sin=self.cos_sin, cache=cache)
        output = torch.empty(query.shape, dtype=query.dtype)
        first_decode = plan.num_prefill_tokens
        if plan.num_prefills:
            self._kernels.prefill(output, query, cache, plan.tiles)
        if len(plan.decode_lens):
            cache = PagedLayer(keys, values, plan.tables[plan.num_prefills :], self.scale)
            self._kernels.decode(output[first_decode:], query[first_decode:], cache, plan.decode_lens)
        return output.view(query.shape[0], -1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._kernels.add_rms_norm(x, residual, weight, eps), residual

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_and_mul(gate_up)


def _tiles(query_lens: list[int], seq_lens: list[int]) -> Tensor:
    """Cut each chunk into tiles; the last tiles of a sequence, which see the most, come first in it."""
    tiles: list[tuple[int, int, int, int]] = []
    row = 0
    for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        computed = seq_len - query_len
        for first in reversed(range(0, query_len, _TILE_TOKENS)):
            tiles.append((seq, row + first, computed + first, min(_TILE_TOKENS, query_len - first)))
        row += query_len
    return torch.tensor(tiles, dtype=torch.int64).view(-1, 4)
