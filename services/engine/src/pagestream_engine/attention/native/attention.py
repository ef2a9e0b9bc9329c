"""Attention by the C++ kernels: the CPU's fast path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagestream_engine.attention.base import Attention, AttentionBatch, AttentionSpec
from pagestream_engine.attention.kv_store import KVStore
from pagestream_engine.attention.native.calls import NativeKernels, PagedLayer, with_contiguous_heads

Int64Array = npt.NDArray[np.int64]

_TILE_TOKENS = 16
"""Query tokens that share each key and value that was widened: with a group of 3, 48 rows to one transposition."""
_NONE = torch.empty(0, 4, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class NativeMetadata:
    """What all layers of a KV group share in a step."""

    tables: Tensor
    """(rows, most blocks) int32."""
    num_tiled: int
    """Leading sequences that are cut into tiles."""
    num_tiled_tokens: int
    tiles: Tensor
    """(tiles, 4) int64: see `NativeKernels.prefill`."""
    decodes: Tensor
    """(decodes, 2) int64: see `NativeKernels.decode`."""


class NativeAttention(Attention[NativeMetadata]):
    """One call for a layer's decodes, one for its prefill tiles."""

    is_deterministic = True

    def __init__(self, store: KVStore, kernels: Mapping[int, NativeKernels]) -> None:
        """`kernels` are by head size."""
        super().__init__(store)
        self._kernels = kernels

    def prepare(self, batch: AttentionBatch, block_size: int) -> NativeMetadata:
        table_rows: Int64Array = batch.table_rows.numpy()
        seq_lens = np.array(batch.seq_lens, np.int64)
        count = batch.num_prefills
        # Decodes of several tokens share each key and value that was widened as chunks do; the bits are the same.
        if max(batch.query_lens[count:], default=1) > 1:
            count = len(batch.query_lens)
        tiled = batch.query_lens[:count]
        return NativeMetadata(
            tables=batch.block_tables,
            num_tiled=count,
            num_tiled_tokens=sum(tiled),
            tiles=torch.from_numpy(_tiles(table_rows[:count], np.array(tiled, np.int64), seq_lens[:count]))
            if tiled
            else _NONE,
            decodes=torch.from_numpy(_decodes(table_rows[count:], seq_lens[count:])),
        )

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, metadata: NativeMetadata) -> Tensor:
        cache, kernels = self.store.layers[layer], self._kernels[spec.head_dim]
        query = with_contiguous_heads(query)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        paged = PagedLayer(cache, metadata.tables, spec)
        if not metadata.num_tiled:
            kernels.decode(output, query, paged, metadata.decodes)
        else:
            kernels.prefill(output, query, paged, metadata.tiles)
            if len(metadata.decodes):
                first = metadata.num_tiled_tokens
                kernels.decode(output[first:], query[first:], paged, metadata.decodes)
        return output.view(query.shape[0], -1)


def _decodes(table_rows: Int64Array, seq_lens: Int64Array) -> Int64Array:
    pairs = np.empty((len(seq_lens), 2), np.int64)
    pairs[:, 0], pairs[:, 1] = table_rows, seq_lens
    return pairs


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
