"""Attention in plain torch operations: runs everywhere, and is what the faster backends are held against."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention.base import Attention, AttentionBatch, AttentionSpec
from pagestream_engine.attention.torch.block_reads import BlockReads, plan_reads


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's chunk within the packed tokens."""

    begin: int
    end: int
    blocks: Tensor
    """(blocks,) int64: those with a token that the chunk sees."""
    places: slice
    """Of the tokens in those blocks the ones that the chunk sees."""
    mask: Tensor | None
    """(new tokens, seen tokens) bool: what each query sees; None is plain causal."""


@dataclass(frozen=True, slots=True)
class WindowMetadata:
    """What layers with one window share."""

    chunks: list[PrefillChunk]
    decodes: BlockReads | None


@dataclass(frozen=True, slots=True)
class TorchMetadata:
    """What all layers of a KV group share in a step."""

    batch: AttentionBatch
    block_size: int
    num_prefill_tokens: int
    windows: dict[int | None, WindowMetadata] = field(default_factory=dict)
    """By `AttentionSpec.window`, filled when a layer first asks."""


class TorchAttention(Attention[TorchMetadata]):
    """Prefill by one product for each chunk; decode by batched products over blocks, no loop."""

    def prepare(self, batch: AttentionBatch, block_size: int) -> TorchMetadata:
        return TorchMetadata(batch, block_size, batch.num_prefill_tokens)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, metadata: TorchMetadata) -> Tensor:
        if spec.window not in metadata.windows:
            metadata.windows[spec.window] = _prepare_window(metadata, spec.window)
        window = metadata.windows[spec.window]
        parts = [self._attend_chunk(layer, query[chunk.begin : chunk.end], spec, chunk) for chunk in window.chunks]
        if window.decodes is not None:
            parts.append(self._attend_decodes(layer, query[metadata.num_prefill_tokens :], spec, window.decodes))
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output.reshape(query.shape[0], -1)

    def _attend_chunk(self, layer: int, query: Tensor, spec: AttentionSpec, chunk: PrefillChunk) -> Tensor:
        key, value = (_in_order(rows, chunk)[None] for rows in self.store.gather(layer, chunk.blocks))
        query = query.transpose(0, 1)[None]
        if spec.soft_cap is None and spec.sinks is None:
            causal = chunk.mask is None
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=chunk.mask, is_causal=causal, scale=spec.scale, enable_gqa=True
            )
        else:
            output = _attend_with_options(query, key, value, spec, chunk.mask)
        return output[0].transpose(0, 1)

    def _attend_decodes(self, layer: int, query: Tensor, spec: AttentionSpec, reads: BlockReads) -> Tensor:
        """Softmax over each query token's blocks: the largest score, then the sums, are reduced by owner."""
        _, num_kv_heads, size, dim = self.store.layers[layer].keys.shape
        group, used = spec.num_heads // num_kv_heads, len(reads.blocks)
        gathered = self.store.gather(layer, reads.blocks)
        keys = gathered.keys.view(-1, size, dim)
        values = reads.clear_hidden(gathered.values).view(-1, size, dim)
        queries = query.reshape(len(query), -1).index_select(0, reads.owners).view(-1, group, dim)
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(used, num_kv_heads, group, size)
        scores = capped(scores.float().mul_(spec.scale), spec).masked_fill_(reads.hidden, -torch.inf)
        largest = reads.largest(scores.amax(-1))
        sinks = None if spec.sinks is None else spec.sinks.view(num_kv_heads, group)
        if sinks is not None:
            largest = largest.maximum(sinks)
        weights = scores.sub_(largest.index_select(0, reads.owners).unsqueeze(-1)).exp_()
        sums = reads.total(weights.sum(-1))
        if sinks is not None:
            sums += (sinks - largest).exp_()
        parts = torch.bmm(weights.to(values.dtype).view(-1, group, size), values)
        output = reads.total(parts.view(used, num_kv_heads, group, dim).float())
        return (output / sums.unsqueeze(-1)).to(query.dtype).view(len(query), -1, dim)


def capped(scores: Tensor, spec: AttentionSpec) -> Tensor:
    """Bound scores by the layer's soft cap, in place."""
    return scores if spec.soft_cap is None else scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)


def _attend_with_options(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """As `scaled_dot_product_attention`, with soft cap and sinks; query (1, num_heads, tokens, head_dim)."""
    group, tokens = spec.num_heads // spec.num_kv_heads, query.shape[2]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = capped((query @ key.transpose(-1, -2)).float().mul_(spec.scale), spec)
    if mask is None:
        mask = torch.ones(tokens, key.shape[2], dtype=torch.bool, device=query.device).tril_()
    scores.masked_fill_(~mask, -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.view(1, -1, 1, 1).expand(1, -1, tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _in_order(gathered: Tensor, chunk: PrefillChunk) -> Tensor:
    """(num_kv_heads, seen tokens, head_dim): keys or values of the chunk's blocks in the sequence's order."""
    rows = gathered.transpose(0, 1)
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, chunk.places]


def _prepare_window(metadata: TorchMetadata, window: int | None) -> WindowMetadata:
    batch, count = metadata.batch, metadata.batch.num_prefills
    gathered = batch.gathered_tables(metadata.block_size)
    chunks = []
    begin = 0
    for index in range(count):
        query_len, seq_len = batch.query_lens[index], batch.seq_lens[index]
        mask, first = _visible(query_len, seq_len, window, batch.positions.device)
        first_block = first // metadata.block_size
        blocks = gathered[index, first_block : -(-seq_len // metadata.block_size)].long()
        shift = first_block * metadata.block_size
        chunks.append(PrefillChunk(begin, begin + query_len, blocks, slice(first - shift, seq_len - shift), mask))
        begin += query_len
    if count == len(batch.seq_lens):
        return WindowMetadata(chunks, None)
    query_lens = torch.tensor(batch.query_lens[count:], device=gathered.device)
    tables = gathered[count:].repeat_interleave(query_lens, dim=0)
    return WindowMetadata(chunks, plan_reads(batch.positions[begin:], tables, metadata.block_size, window))


def _visible(query_len: int, seq_len: int, window: int | None, device: torch.device) -> tuple[Tensor | None, int]:
    """Return the mask of a chunk (see `PrefillChunk`), and the first position that it sees."""
    computed = seq_len - query_len
    first = 0 if window is None else max(0, computed + 1 - window)
    if not computed and (window is None or window >= seq_len):
        return None, 0
    places = torch.arange(first, seq_len, device=device)
    rows = torch.arange(computed, seq_len, device=device)[:, None]
    mask = places <= rows
    return (mask if window is None else mask & (places > rows - window)), first
