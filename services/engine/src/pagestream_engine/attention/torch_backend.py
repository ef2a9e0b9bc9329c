"""Attention in plain torch operations: runs everywhere, and is what the faster backends are held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention.base import AttentionBackend, AttentionBatch


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's chunk within the packed tokens."""

    begin: int
    end: int
    seq_len: int
    blocks: Tensor | None
    """(blocks,) int64 of the whole sequence; None where the chunk starts it, and all its keys are in hand."""
    mask: Tensor | None
    """(new tokens, seq_len) bool: what each query sees; None is plain causal."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The decodes' blocks laid end to end: one row for each block that any of them uses, shared ones repeated."""

    blocks: Tensor
    """(used,) int64: the block of each row."""
    owners: Tensor
    """(used,) int64: which decode reads it."""
    bias: Tensor
    """(used, 1, 1, block_size) float32: 0 where the owner has a token, -inf past its end."""
    num_seqs: int


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """What all layers of a step share."""

    slots: Tensor
    cos: Tensor
    """(tokens, 1, head_dim) of the model's dtype; both halves of the head hold the same angles."""
    sin: Tensor
    """As `cos`, the first half negated: rotation is x * cos + swap_halves(x) * sin."""
    num_prefill_tokens: int
    chunks: list[PrefillChunk]
    decode: DecodePlan | None


class TorchBackend(AttentionBackend[TorchPlan]):
    """Prefill by `scaled_dot_product_attention` for each chunk; decode by batched products over blocks, no loop."""

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        cos, sin = self.cos_sin[batch.positions].to(self.shape.dtype).chunk(2, dim=-1)
        num_decodes = len(batch.seq_lens) - batch.num_prefills
        return TorchPlan(
            slots=batch.slots,
            cos=torch.cat((cos, cos), dim=-1).unsqueeze(1),
            sin=torch.cat((-sin, sin), dim=-1).unsqueeze(1),
            num_prefill_tokens=batch.num_prefill_tokens,
            chunks=self._plan_chunks(batch),
            decode=self._plan_decode(batch) if num_decodes else None,
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: TorchPlan) -> Tensor:
        query, key = _rotate(query, plan), _rotate(key, plan)
        self._write(layer, key, value, plan.slots)
        parts = [self._attend_chunk(layer, query, key, value, chunk) for chunk in plan.chunks]
        if plan.decode is not None:
            parts.append(self._attend_decodes(layer, query[plan.num_prefill_tokens :], plan.decode))
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output.view(query.shape[0], -1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return wide.to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def _write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        blocks, offsets = slots // self.shape.block_size, slots % self.shape.block_size
        self.key_cache[layer][blocks, :, offsets] = key
        self.value_cache[layer][blocks, :, offsets] = value

    def _plan_chunks(self, batch: AttentionBatch) -> list[PrefillChunk]:
        chunks = []
        begin = 0
        for index in range(batch.num_prefills):
            query_len, seq_len = batch.query_lens[index], batch.seq_lens[index]
            blocks = mask = None
            if seq_len > query_len:
                used = -(-seq_len // self.shape.block_size)
                blocks = batch.block_tables[index, :used].long()
                places = torch.arange(seq_len, device=self.device)
                mask = places <= places[seq_len - query_len :, None]
            chunks.append(PrefillChunk(begin, begin + query_len, seq_len, blocks, mask))
            begin += query_len
        return chunks

    def _attend_chunk(self, layer: int, query: Tensor, key: Tensor, value: Tensor, chunk: PrefillChunk) -> Tensor:
        query = query[chunk.begin : chunk.end].transpose(0, 1)
        if chunk.blocks is None:
            key, value = (x[chunk.begin : chunk.end].transpose(0, 1) for x in (key, value))
        else:
            key, value = (self._gather(cache[layer], chunk) for cache in (self.key_cache, self.value_cache))
        output = F.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self.scale,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1)

    def _gather(self, cache: Tensor, chunk: PrefillChunk) -> Tensor:
        """(num_kv_heads, seq_len, head_dim): the sequence's keys or values in order."""
        if chunk.blocks is None:
            raise ValueError("a chunk that starts its sequence has no blocks to gather")
        rows = cache.index_select(0, chunk.blocks).transpose(0, 1)
        return rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, : chunk.seq_len]

    def _plan_decode(self, batch: AttentionBatch) -> DecodePlan:
        size = self.shape.block_size
        seq_lens = torch.tensor(batch.seq_lens[batch.num_prefills :], device=self.device)
        tables = batch.block_tables[batch.num_prefills :]
        starts = torch.arange(tables.shape[1], device=self.device) * size
        used = starts < seq_lens[:, None]
        owners, columns = used.nonzero(as_tuple=True)
        left = seq_lens[owners] - starts[columns]
        beyond = torch.arange(size, device=self.device) >= left[:, None]
        bias = torch.zeros(beyond.shape, device=self.device).masked_fill_(beyond, -torch.inf)
        return DecodePlan(tables[used].long(), owners, bias[:, None, None], len(seq_lens))

    def _attend_decodes(self, layer: int, query: Tensor, plan: DecodePlan) -> Tensor:
        """Softmax over each sequence's blocks: the largest score, then the sums, are reduced by owner."""
        num_kv_heads, dim, size = self.shape.num_kv_heads, self.shape.head_dim, self.shape.block_size
        group, used, owners = query.shape[1] // num_kv_heads, len(plan.blocks), plan.owners
        keys = self.key_cache[layer].index_select(0, plan.blocks).view(-1, size, dim)
        values = self.value_cache[layer].index_select(0, plan.blocks).view(-1, size, dim)
        queries = query.reshape(plan.num_seqs, -1).index_select(0, owners).view(-1, group, dim)
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(used, num_kv_heads, group, size)
        scores = scores.float().mul_(self.scale).add_(plan.bias)
        largest = _reduce(scores.amax(-1), plan, "amax")
        weights = scores.sub_(largest.index_select(0, owners).unsqueeze(-1)).exp_()
        sums = _reduce(weights.sum(-1), plan, "sum")
        parts = torch.bmm(weights.to(values.dtype).view(-1, group, size), values)
        output = _reduce(parts.view(used, num_kv_heads, group, dim).float(), plan, "sum")
        return (output / sums.unsqueeze(-1)).to(query.dtype).view(plan.num_seqs, -1, dim)


def _reduce(rows: Tensor, plan: DecodePlan, kind: str) -> Tensor:
    """(used, ...) -> (num_seqs, ...): rows of one owner summed, or their largest."""
    size = (plan.num_seqs, *rows.shape[1:])
    if kind == "sum":
        return torch.zeros(size, dtype=rows.dtype, device=rows.device).index_add_(0, plan.owners, rows)
    lowest = torch.full(size, -torch.inf, dtype=rows.dtype, device=rows.device)
    owners = plan.owners.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
    return lowest.scatter_reduce_(0, owners, rows, "amax")


def _rotate(x: Tensor, plan: TorchPlan) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * plan.cos).addcmul_(torch.cat((second, first), dim=-1), plan.sin)
