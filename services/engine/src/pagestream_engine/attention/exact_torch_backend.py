"""Attention in torch operations whose bits for a token depend on its sequence alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagestream_engine.attention.base import AttentionBackend, AttentionBatch
from pagestream_engine.attention.exact_math import exponential, tree_sum

_SLICE_TOKENS = 64
"""Query tokens at a time: bounds the copies of keys and values that they read."""
_PRODUCTS = 256
"""Matrices in every batched product: torch and the libraries below it choose their kernels by this number too."""


@dataclass(frozen=True, slots=True)
class QuerySlice:
    """Some packed tokens, and the blocks that each of them sees, laid end to end: shared ones are repeated."""

    begin: int
    end: int
    blocks: Tensor
    """(used,) int64."""
    owners: Tensor
    """(used,) int64: which of the slice's tokens reads it."""
    bias: Tensor
    """(used, 1, 1, block_size) float32: 0 where the owner sees a token, -inf past itself."""


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """What all layers of a step share."""

    slots: Tensor
    cos: Tensor
    """(tokens, 1, head_dim) of the model's dtype; both halves of the head hold the same angles."""
    sin: Tensor
    """As `cos`, the first half negated: rotation is x * cos + swap_halves(x) * sin."""
    slices: list[QuerySlice]


class ExactTorchBackend(AttentionBackend[ExactPlan]):
    """Every token attends by itself, as a decode does: one product a block, its results added up in the blocks' order.

    A prompt of t tokens reads its keys and values t / 2 times: for machines without the C++ kernels, where exactness is
    worth that.
    """

    is_exact = True

    def plan(self, batch: AttentionBatch) -> ExactPlan:
        cos, sin = self.cos_sin[batch.positions].to(self.shape.dtype).chunk(2, dim=-1)
        lens = torch.tensor(batch.query_lens, device=self.device)
        tables = batch.block_tables.repeat_interleave(lens, dim=0)
        return ExactPlan(
            slots=batch.slots,
            cos=torch.cat((cos, cos), dim=-1).unsqueeze(1),
            sin=torch.cat((-sin, sin), dim=-1).unsqueeze(1),
            slices=[self._plan_slice(batch.positions, tables, begin) for begin in range(0, len(tables), _SLICE_TOKENS)],
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: ExactPlan) -> Tensor:
        query, key = _rotate(query, plan), _rotate(key, plan)
        size = self.shape.block_size
        blocks, offsets = plan.slots // size, plan.slots % size
        self.key_cache[layer][blocks, :, offsets] = key
        self.value_cache[layer][blocks, :, offsets] = value
        output = torch.cat([self._attend_slice(layer, query[part.begin : part.end], part) for part in plan.slices])
        return output.view(query.shape[0], -1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean = tree_sum(wide.square()).div_(x.shape[-1]).add_(eps)
        return (wide / mean.sqrt_().unsqueeze(-1)).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        wide = gate.float()
        return (wide / exponential(-wide).add_(1.0)).to(gate.dtype).mul_(up)

    def _plan_slice(self, positions: Tensor, tables: Tensor, begin: int) -> QuerySlice:
        size, end = self.shape.block_size, min(begin + _SLICE_TOKENS, len(tables))
        visible, tables = positions[begin:end] + 1, tables[begin:end]
        starts = torch.arange(tables.shape[1], device=self.device) * size
        used = starts < visible[:, None]
        owners, columns = used.nonzero(as_tuple=True)
        left = visible[owners] - starts[columns]
        beyond = torch.arange(size, device=self.device) >= left[:, None]
        bias = torch.zeros(beyond.shape, device=self.device).masked_fill_(beyond, -torch.inf)
        return QuerySlice(begin, end, tables[used].long(), owners, bias[:, None, None])

    def _attend_slice(self, layer: int, query: Tensor, part: QuerySlice) -> Tensor:
        num_kv_heads, dim, size = self.shape.num_kv_heads, self.shape.head_dim, self.shape.block_size
        group, used, owners, tokens = query.shape[1] // num_kv_heads, len(part.blocks), part.owners, len(query)
        keys = self.key_cache[layer].index_select(0, part.blocks).view(-1, size, dim)
        values = self.value_cache[layer].index_select(0, part.blocks).view(-1, size, dim)
        queries = query.reshape(tokens, -1).index_select(0, owners).view(-1, group, dim)
        scores = _products(queries, keys, transpose=True).view(used, num_kv_heads, group, size)
        scores = scores.float().mul_(self.scale).add_(part.bias)
        largest = scores.new_full((tokens, num_kv_heads, group), -torch.inf)
        largest.scatter_reduce_(0, owners[:, None, None].expand(used, num_kv_heads, group), scores.amax(-1), "amax")
        weights = exponential(scores.sub_(largest.index_select(0, owners).unsqueeze(-1)))
        sums = _added(tree_sum(weights), owners, tokens)
        parts = _products(weights.to(values.dtype).view(-1, group, size), values, transpose=False)
        output = _added(parts.view(used, num_kv_heads, group, dim).float(), owners, tokens)
        return (output / sums.unsqueeze(-1)).to(query.dtype).view(tokens, -1, dim)


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


def _added(rows: Tensor, owners: Tensor, tokens: int) -> Tensor:
    """(used, ...) -> (tokens, ...): rows of one owner added one after another, in their order."""
    return rows.new_zeros(tokens, *rows.shape[1:]).index_add_(0, owners, rows)


def _rotate(x: Tensor, plan: ExactPlan) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * plan.cos + torch.cat((second, first), dim=-1) * plan.sin
