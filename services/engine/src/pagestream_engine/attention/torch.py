"""Attention and operators in plain torch operations: they run everywhere; the faster backends are held against them.

The deterministic ones give a token bits that depend on its sequence alone. Torch's own exponential takes one algorithm
for whole vectors and another for what is left at the end of a thread's part, and its sums are cut among threads by
shape. There everything is made of additions, multiplications and divisions, which IEEE 754 rounds exactly, in an order
that is written down; and of torch's square roots, which need not be the nearest ones, but have not been seen to depend
on anything but the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention.base import (
    Activation,
    Angles,
    Attention,
    AttentionBatch,
    AttentionSpec,
    Backend,
    CacheShape,
    KVStore,
    Operators,
    Rotation,
)
from pagestream_engine.errors import ConfigError

_NOT_DETERMINISTIC = (
    "the order in which torch adds up there depends on the sizes of a step; with the Triton kernels a GPU computes "
    "deterministically"
)


def make_backend(shapes: Sequence[CacheShape], device: torch.device, *, deterministic: bool) -> Backend:
    """Build the backend of torch's operations; see `select_backend`."""
    if deterministic and device.type != "cpu":
        raise ConfigError("deterministic", True, "False or None with attention by torch on a GPU", _NOT_DETERMINISTIC)
    store, dtype = KVStore(shapes, device), shapes[0].dtype
    if deterministic:
        return Backend(
            "deterministic torch", store, DeterministicTorchAttention(store), DeterministicTorchOperators(dtype)
        )
    return Backend("torch", store, TorchAttention(store), TorchOperators(dtype))


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's chunk within the packed tokens."""

    begin: int
    end: int
    blocks: Tensor
    """(blocks,) int64: those with a token that the chunk sees."""
    places: slice
    """Of the tokens in those blocks the ones that the chunk sees."""
    first: int
    """Position of the first one."""
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
        if spec.soft_cap is None and spec.sinks is None and spec.slopes is None:
            causal = chunk.mask is None
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=chunk.mask, is_causal=causal, scale=spec.scale, enable_gqa=True
            )
        else:
            output = _attend_with_options(query, key, value, spec, chunk)
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
        scores = capped(scores.float().mul_(spec.scale), spec)
        scores = sloped(scores, spec, reads).masked_fill_(reads.hidden, -torch.inf)
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


def sloped(scores: Tensor, spec: AttentionSpec, reads: BlockReads) -> Tensor:
    """Let (used, num_kv_heads, group, block_size) scores fall by the layer's slopes, in place."""
    if spec.slopes is None:
        return scores
    slopes = spec.slopes.view(scores.shape[1], -1, 1)
    return scores.add_(_shares(spec, slopes, reads.places[:, None, None], reads.own[:, None, None]))


def _shares(spec: AttentionSpec, slopes: Tensor, places: Tensor, own: Tensor) -> Tensor:
    """What scores get by slopes, of keys and query tokens at these places."""
    return (slopes * places.float()).bfloat16().float() if spec.rounds_slopes else slopes * (places - own).float()


def _attend_with_options(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, chunk: PrefillChunk) -> Tensor:
    """As `scaled_dot_product_attention`, with soft cap, slopes and sinks; query (1, num_heads, tokens, head_dim)."""
    mask = chunk.mask
    group, tokens = spec.num_heads // spec.num_kv_heads, query.shape[2]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = capped((query @ key.transpose(-1, -2)).float().mul_(spec.scale), spec)
    if spec.slopes is not None:  # the last key is the last query's own
        places = torch.arange(key.shape[2], device=query.device) + chunk.first
        scores.add_(_shares(spec, spec.slopes[:, None, None], places, places[-tokens:, None]))
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
        places = slice(first - shift, seq_len - shift)
        chunks.append(PrefillChunk(begin, begin + query_len, blocks, places, first, mask))
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


@dataclass(frozen=True, slots=True)
class BlockReads:
    """One row for each block that any of the query tokens sees; blocks that several see are repeated."""

    blocks: Tensor
    """(used,) int64: the block of each row."""
    owners: Tensor
    """(used,) int64: which query token reads it."""
    hidden: Tensor
    """(used, 1, 1, block_size) bool: tokens of the block that its owner does not see."""
    partial: Tensor
    """(rows,) int64: the rows with a hidden token."""
    places: Tensor
    """(used, block_size) int64: of the block's tokens in their sequence."""
    own: Tensor
    """(used, 1) int64: of the owner."""
    num_owners: int

    def clear_hidden(self, rows: Tensor) -> Tensor:
        """(used, num_kv_heads, block_size, head_dim): put 0 where hidden, in place."""
        if len(self.partial):
            hidden = self.hidden.index_select(0, self.partial).transpose(2, 3)
            rows.index_copy_(0, self.partial, rows.index_select(0, self.partial).masked_fill_(hidden, 0))
        return rows

    def total(self, rows: Tensor) -> Tensor:
        """(used, ...) -> (owners, ...): rows of one owner added one after another, in their order."""
        return rows.new_zeros(self.num_owners, *rows.shape[1:]).index_add_(0, self.owners, rows)

    def largest(self, rows: Tensor) -> Tensor:
        """(used, ...) -> (owners, ...): the largest of each owner's rows."""
        lowest = rows.new_full((self.num_owners, *rows.shape[1:]), -torch.inf)
        owners = self.owners.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
        return lowest.scatter_reduce_(0, owners, rows, "amax")


def plan_reads(positions: Tensor, tables: Tensor, block_size: int, window: int | None) -> BlockReads:
    """Find what query tokens read.

    Args:
        positions: (owners,) int64: of the query tokens in their sequences.
        tables: (owners, most blocks) int32: of their sequences.
        block_size: tokens a block.
        window: most tokens that each sees, itself included; None: all.
    """
    ends = positions[:, None] + 1
    begins = (ends - window).clamp_(min=0) if window is not None else torch.zeros_like(ends)
    starts = torch.arange(tables.shape[1], device=tables.device) * block_size
    used = (starts < ends) & (starts + block_size > begins)
    owners, columns = used.nonzero(as_tuple=True)
    places = starts[columns, None] + torch.arange(block_size, device=tables.device)
    hidden = (places >= ends[owners]) | (places < begins[owners])
    partial = hidden.any(dim=1).nonzero().squeeze(1)
    own = positions[owners, None]
    return BlockReads(tables[used].long(), owners, hidden[:, None, None], partial, places, own, len(positions))


class TorchOperators(Operators):
    """Whatever torch holds best for a shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype` is the model's."""
        self._dtype = dtype

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return weighted(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), weight, x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_and_mul(self, gate_up: Tensor, *, tanh: bool) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if weight.dim() == 1:
            return F.layer_norm(x, weight.shape, weight, bias, eps)
        return _scaled(F.layer_norm(x.float(), x.shape[-1:], eps=eps), weight, bias, x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.layer_norm(total, weight, bias, eps), total

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        if activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")

    def angles(self, rotation: Rotation, positions: Tensor) -> Angles:
        cos, sin = rotation.cos_sin[positions].to(self._dtype).unsqueeze(1).chunk(2, dim=-1)
        if rotation.interleaved:
            cos, sin = cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Angles(rotation, positions, cos, sin)

    def rotate(self, query: Tensor, key: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        return self._rotate(query, angles), self._rotate(key, angles)

    def _rotate(self, x: Tensor, angles: Angles) -> Tensor:
        cos, sin = angles.cos, angles.sin
        if cos is None or sin is None:
            raise ValueError("angles: given without cosines and sines, expected those that `angles` of this class made")
        dim = cos.shape[-1]
        if dim == x.shape[-1]:
            return self._turned(x, _partners(x, angles.rotation), cos, sin)
        part = x[..., :dim]
        return torch.cat((self._turned(part, _partners(part, angles.rotation), cos, sin), x[..., dim:]), dim=-1)

    def _turned(self, x: Tensor, partners: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (x * cos).addcmul_(partners, sin)


def weighted(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `normed`, in float32, to `dtype` and multiply; or the other way round with a weight in float32."""
    return normed.to(dtype) * weight if weight.dtype == dtype else (normed * weight).to(dtype)


def _scaled(normed: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply `normed`, in float32, and add, before it is rounded to `dtype`."""
    scaled = normed * weight.float()
    return (scaled if bias is None else scaled + bias.float()).to(dtype)


def _partners(x: Tensor, rotation: Rotation) -> Tensor:
    """(..., rotary_dim): for each element the one that it turns with."""
    if rotation.interleaved:
        return x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


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
        scores = sloped(_capped(scores.mul_(spec.scale), spec), spec, reads)
        scores = scores.masked_fill_(reads.hidden, -torch.inf)
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


_GELU_CUBIC, _GELU_FACTOR = 0.044715, 0.7978845608028654
"""Of the tanh formula; the factor is sqrt(2 / pi)."""
_SQRT_HALF = 0.7071067811865476


class DeterministicTorchOperators(TorchOperators):
    """Sums in a written order, functions made of what IEEE 754 rounds exactly."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean = tree_sum(wide.square()).div_(x.shape[-1]).add_(eps)
        return weighted(wide / mean.sqrt_().unsqueeze(-1), weight, x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide = x.float()
        wide = wide - tree_sum(wide).div_(x.shape[-1]).unsqueeze(-1)
        variance = tree_sum(wide.square()).div_(x.shape[-1]).add_(eps)
        return _scaled(wide / variance.sqrt_().unsqueeze(-1), weight, bias, x.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activate(gate, "silu").mul_(up)

    def gelu_and_mul(self, gate_up: Tensor, *, tanh: bool) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activate(gate, "gelu_tanh" if tanh else "gelu").mul_(up)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        wide = x.float()
        if activation == "silu":
            return (wide / exponential(-wide).add_(1.0)).to(x.dtype)
        if activation == "gelu_tanh":
            inner = (wide * wide * wide).mul_(_GELU_CUBIC).add_(wide).mul_(_GELU_FACTOR)
            share = hyperbolic_tangent(inner)
        else:
            share = error_function(wide * _SQRT_HALF)
        return share.add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)

    def _turned(self, x: Tensor, partners: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + partners * sin


_LOWEST, _HIGHEST = -87.0, 88.0
_LOG2_E = 1.44269504088896341
_FACTORS = (1.5403530393e-4, 1.3333558146e-3, 9.6181291076e-3, 5.5504108665e-2, 2.4022650696e-1, 6.9314718056e-1, 1.0)
"""Of the polynomial for 2^f, |f| <= 1/2, from f^6 down to 1."""
_ERF_PLACE = 0.3275911
_ERF_FACTORS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Of the polynomial in 1 / (1 + _ERF_PLACE |x|), from its fifth power down to its first."""
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


def exponential(x: Tensor) -> Tensor:
    """exp(x) of float32, relative error about 1e-7 + |x| / 2^23; 0 below -87. As in C++: 2^n times a polynomial."""
    scaled = x.clamp(_LOWEST, _HIGHEST).mul_(_LOG2_E)
    whole = scaled.round()
    fraction = scaled.sub_(whole)
    polynomial = torch.full_like(x, _FACTORS[0])
    for factor in _FACTORS[1:]:
        polynomial.mul_(fraction).add_(factor)
    power = whole.to(torch.int32).add_(_EXPONENT_BIAS).bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)
    return polynomial.mul_(power).masked_fill_(x < _LOWEST, 0.0)


def hyperbolic_tangent(x: Tensor) -> Tensor:
    """tanh(x) of float32, absolute error about 1e-7."""
    return 1.0 - 2.0 / exponential(2.0 * x).add_(1.0)


def error_function(x: Tensor) -> Tensor:
    """erf(x) of float32, absolute error below 5e-7 (Abramowitz and Stegun 1964, 7.1.26)."""
    size = x.abs()
    place = 1.0 / (size * _ERF_PLACE + 1.0)
    polynomial = torch.full_like(x, _ERF_FACTORS[0])
    for factor in _ERF_FACTORS[1:]:
        polynomial.mul_(place).add_(factor)
    rest = polynomial.mul_(place).mul_(exponential(-(size * size)))
    return torch.copysign(1.0 - rest, x)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, halves added to halves."""
    size = x.shape[-1]
    width = 1 << (size - 1).bit_length()
    if width > size:
        x = F.pad(x, (0, width - size))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x.squeeze(-1)
