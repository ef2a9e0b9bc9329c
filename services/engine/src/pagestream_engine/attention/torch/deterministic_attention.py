"""Attention in torch operations whose bits for a token depend on its sequence alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagestream_engine.attention.base import Attention, AttentionBatch, AttentionSpec
from pagestream_engine.attention.torch.block_reads import BlockReads, plan_reads
from pagestream_engine.attention.torch.deterministic_math import exponential, hyperbolic_tangent, tree_sum

_SLICE_TOKENS = 64
"""Query tokens at a time: bounds the copies of keys and values that they read."""
_PRODUCTS = 256
"""Matrices in every batched product: torch and the libraries below it choose their kernels by this number too."""


@dataclass(frozen=True, slots=True)
class DeterministicTorchMetadata:
    """What all layers of a KV group share in a step."""

    positions: Tensor
    """(tokens,) int64."""
    tables: Tensor
    """(tokens, most blocks) int32: each token has its sequence's."""
    block_size: int
    windows: dict[int | None, list[BlockReads]] = field(default_factory=dict)
    """By `AttentionSpec.window`, filled when a layer first asks: the reads of each slice of tokens."""


class DeterministicTorchAttention(Attention[DeterministicTorchMetadata]):
    """Every token attends by itself, as a decode does: one product a block, its results added up in the blocks' order.

    A prompt of t tokens reads its keys and values t / 2 times: for machines without the C++ kernels, where
    determinism is worth that.
    """

    is_deterministic = True

    def prepare(self, batch: AttentionBatch, block_size: int) -> DeterministicTorchMetadata:
        query_lens = torch.tensor(batch.query_lens, device=batch.positions.device)
        tables = batch.gathered_tables(block_size).repeat_interleave(query_lens, dim=0)
        return DeterministicTorchMetadata(batch.positions, tables, block_size)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, metadata: DeterministicTorchMetadata) -> Tensor:
        if spec.window not in metadata.windows:
            metadata.windows[spec.window] = [
                plan_reads(positions, tables, metadata.block_size, spec.window)
                for positions, tables in zip(
                    torch.split(metadata.positions, _SLICE_TOKENS),
                    torch.split(metadata.tables, _SLICE_TOKENS),
                    strict=True,
                )
            ]
        slices = zip(torch.split(query, _SLICE_TOKENS), metadata.windows[spec.window], strict=True)
        output = torch.cat([self._attend_slice(layer, part, spec, reads) for part, reads in slices])
        return output.view(query.shape[0], -1)

    def _attend_slice(self, layer: int, query: Tensor, spec: AttentionSpec, reads: BlockReads) -> Tensor:
        _, num_kv_heads, size, dim = self.store.layers[layer].keys.shape
        group, used = spec.num_heads // num_kv_heads, len(reads.blocks)
        gathered = self.store.gather(layer, reads.blocks)
        keys, values = (reads.clear_hidden(each).view(-1, size, dim) for each in gathered)
        queries = query.reshape(len(query), -1).index_select(0, reads.owners).view(-1, group, dim)
        scores = _products(queries, keys, transpose=True).view(used, num_kv_heads, group, size).float()
        scores = _capped(scores.mul_(spec.scale), spec).masked_fill_(reads.hidden, -torch.inf)
        largest = reads.largest(scores.amax(-1))
        sinks = None if spec.sinks is None else spec.sinks.view(num_kv_heads, group)
        if sinks is not None:
            largest = largest.maximum(sinks)
        weights = exponential(scores.sub_(largest.index_select(0, reads.owners).unsqueeze(-1)))
        sums = reads.total(tree_sum(weights))
        if sinks is not None:
            sums += exponential(sinks - largest)
        parts = _products(weights.to(values.dtype).view(-1, group, size), values, transpose=False)
        output = reads.total(parts.view(used, num_kv_heads, group, dim).float())
        return (output / sums.unsqueeze(-1)).to(query.dtype).view(len(query), -1, dim)


def _capped(scores: Tensor, spec: AttentionSpec) -> Tensor:
    return scores if spec.soft_cap is None else hyperbolic_tangent(scores / spec.soft_cap).mul_(spec.soft_cap)


def _products(a: Tensor, b: Tensor, *, transpose: bool) -> Tensor:
    """Products of matrices of a with those of b, or with those of b transposed, each by a kernel for one and the same
    shape.
    """
    parts = []
    for begin in range(0, len(a), _PRODUCTS):
        left, right = (_filled(x[begin : begin + _PRODUCTS]) for x in (a, b))
        parts.append(torch.bmm(left, right.transpose(1, 2) if transpose else right))
    return torch.cat(parts)[: len(a)]


def _filled(matrices: Tensor) -> Tensor:
    missing = _PRODUCTS - len(matrices)
    return torch.cat((matrices, matrices.new_zeros(missing, *matrices.shape[1:]))) if missing else matrices
