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
