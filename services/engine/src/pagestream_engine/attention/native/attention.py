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
        query_lens, seq_lens = (np.asarray(lens, np.int64) for lens in (batch.query_lens, batch.seq_lens))
        table_rows: Int64Array = batch.table_rows.numpy()
        count = batch.num_prefills
        # Decodes of several tokens share each key and value that was widened as chunks do; the bits are the same.
        if (query_lens[count:] > 1).any():
            count = len(query_lens)
        return NativeMetadata(
            tables=batch.block_tables,
            num_tiled=count,
            num_tiled_tokens=int(query_lens[:count].sum()),
            tiles=torch.from_numpy(_tiles(table_rows[:count], query_lens[:count], seq_lens[:count]))
            if count
            else _NONE,
            decodes=torch.from_numpy(_decodes(table_rows[count:], seq_lens[count:])),
        )

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, metadata: NativeMetadata) -> Tensor:
        cache, kernels = self.store.layers[layer], self._kernels[spec.head_dim]
        query = with_contiguous_heads(query)
        output = torch.empty(query.shape, dtype=query.dtype)
        first_decode = metadata.num_tiled_tokens
        if metadata.num_tiled:
            kernels.prefill(output, query, PagedLayer(cache, metadata.tables, spec), metadata.tiles)
        if len(metadata.decodes):
            tables = PagedLayer(cache, metadata.tables, spec)
            kernels.decode(output[first_decode:], query[first_decode:], tables, metadata.decodes)
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
