"""Backends against plain attention in float64, one case at a time; a case is a plain dict, as in support.kernels.cases.

All that must not show in a step's result is NaN: blocks that no sequence owns, tokens behind every window, and what has
not been written of a sequence's last block. Table entries of blocks that are not read are -1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from pagestream_engine.attention import (
    AttentionBatch,
    AttentionSpec,
    Backend,
    CacheShape,
    HeadNorm,
    KVStore,
    Rotation,
    StepContext,
    select_backend,
)
from pagestream_engine.layers.attention import PagedAttention
from support.pairwise import Case
from torch import Tensor

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Inputs are standard normal: a few roundings of the dtype."""
CACHE_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
CACHE_TOLERANCES = {"auto": 0.0, "bfloat16": 3e-2, "fp8": 0.25}
"""What rounding keys and values to the cache's dtype adds: float8 is off by up to a sixteenth of an element."""

FACTORS: Mapping[str, Sequence[Any]] = {
    "dtype": tuple(DTYPES),
    "head_dim": (16, 64, 80),
    "heads": ((4, 4), (6, 2), (8, 1)),
    "block_size": (8, 16, 32),
    "window": (None, 1, 5, 16, 37),
    "soft_cap": (None, 3.0),
    "sinks": (False, True),
    "rotation": (None, "neox", "interleaved", "partial"),
    "norm": (None, "narrow", "wide"),
    "scale": (None, 0.3),
}

_NAN_BYTE = 0x7F
"""Of float8."""

Span = tuple[int, int, int]
"""A sequence, its first new token, and the end of its new tokens."""

STEPS: Sequence[tuple[Sequence[Span], int]] = (
    ([(0, 0, 1), (1, 0, 16), (2, 0, 25), (3, 0, 50)], 4),  # whole prompts, and first chunks
    ([(2, 25, 38), (3, 50, 83), (1, 16, 17)], 2),  # chunks with context beside a decode
    ([(0, 1, 2), (3, 83, 84), (2, 38, 39), (1, 17, 18)], 0),  # decodes
    ([(1, 18, 22), (2, 39, 40), (3, 84, 87)], 0),  # decodes of several tokens
    ([(3, 87, 104)], 0),
)
"""Each with its number of prefills."""
LENGTHS = (2, 22, 40, 104)


@dataclass
class Sequences:
    """All tokens' queries, keys and values of some sequences in one layer, and tables that scatter them over a pool."""

    case: Case
    lengths: Sequence[int]
    group: int = 0
    """KV group of the layer."""
    pool: list[int] = field(default_factory=list)
    """Free blocks, taken from the end."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(repr((self.case, self.group)).encode()))
        num_heads, kv_heads = self.case["heads"]
        size = (num_heads + 2 * kv_heads, self.case["head_dim"])
        dtype = DTYPES[self.case["dtype"]]
        self.qkv = [torch.randn(length, *size, generator=generator).to(dtype) for length in self.lengths]
        self.sinks = torch.randn(num_heads, generator=generator) if self.case["sinks"] else None
        block_size = self.case["block_size"]
        counts = [-(-length // block_size) for length in self.lengths]
        if not self.pool:
            self.pool = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        self.num_blocks = max(self.pool) + 1
        self.tables = [[self.pool.pop() for _ in range(count)] for count in counts]

    @property
    def shape(self) -> CacheShape:
        """Of the layer's cache, alone in its group."""
        kv_heads, case = self.case["heads"][1], self.case
        kept, dtype = CACHE_DTYPES[case.get("cache", "auto")], DTYPES[case["dtype"]]
        kept = None if kept == dtype else kept
        return CacheShape((self.group,), kv_heads, case["head_dim"], case["block_size"], dtype, kept)

    @property
    def spec(self) -> AttentionSpec:
        """Of the layer."""
        case = self.case
        scale = case["scale"] or case["head_dim"] ** -0.5
        window, soft_cap = case["window"], case["soft_cap"]
        return AttentionSpec(*case["heads"], case["head_dim"], scale, window, soft_cap, self.sinks)

    @cached_property
    def rotation(self) -> Rotation | None:
        """Of query and key."""
        kind = self.case["rotation"]
        if kind is None:
            return None
        dim = self.case["head_dim"] // (2 if kind == "partial" else 1)
        angles = torch.outer(torch.arange(float(max(self.lengths))), 10_000.0 ** -(torch.arange(0, dim, 2) / dim))
        return Rotation(torch.cat((angles.cos(), angles.sin()), dim=-1), kind == "interleaved")

    @cached_property
    def norm(self) -> HeadNorm | None:
        """Of query and key: by weights of their dtype, or in float32."""
        kind = self.case.get("norm")
        if kind is None:
            return None
        dtype = torch.float32 if kind == "wide" else DTYPES[self.case["dtype"]]
        generator = torch.Generator().manual_seed(5)
        query, key = (1.0 + 0.3 * torch.randn(2, self.case["head_dim"], generator=generator)).to(dtype).unbind(0)
        return HeadNorm(query, key, 1e-2)

    def batch(self, spans: Sequence[Span], num_prefills: int) -> AttentionBatch:
        """Pack the spans of a step."""
        size = self.case["block_size"]
        width = max(-(-end // size) for _, _, end in spans) + 1
        # The step's sequences are some rows of the tables, in another order.
        rows = range(2 * len(spans) - 1, 0, -2)
        tables = torch.full((2 * len(spans), width), -1, dtype=torch.int32)
        for row, (seq, first, end) in zip(rows, spans, strict=True):
            begin, used = self.first_seen(first) // size, -(-end // size)
            tables[row, begin:used] = torch.tensor(self.tables[seq][begin:used], dtype=torch.int32)
        places = [(self.tables[seq], place) for seq, first, end in spans for place in range(first, end)]
        return AttentionBatch(
            positions=torch.tensor([place for _, place in places]),
            slots=torch.tensor([table[place // size] * size + place % size for table, place in places]),
            block_tables=tables,
            table_rows=torch.tensor(rows),
            query_lens=[end - first for _, first, end in spans],
            seq_lens=[end for _, _, end in spans],
            num_prefills=num_prefills,
        )

    def first_seen(self, position: int) -> int:
        """First token that a query token at a position sees."""
        window = self.case["window"]
        return 0 if window is None else max(0, position + 1 - window)

    def forget(self, backend: Backend, spans: Sequence[Span]) -> None:
        """Fill all slots that no token from the spans' first on will see with NaN."""
        size = self.case["block_size"]
        for seq, first, _ in spans:
            for place in range(self.first_seen(first)):
                for cache in backend.store.layers[self.group]:
                    rows = cache.view(torch.uint8) if backend.store.has_scales else cache
                    nan = _NAN_BYTE if backend.store.has_scales else math.nan
                    rows[self.tables[seq][place // size], :, place % size] = nan

    def attend(self, backend: Backend, context: StepContext, spans: Sequence[Span]) -> list[Tensor]:
        """Run the layer; each span's output, (tokens, num_heads * head_dim)."""
        device, (num_heads, kv_heads) = backend.store.device, self.case["heads"]
        packed = torch.cat([self.qkv[seq][first:end] for seq, first, end in spans]).to(device)
        query, key, value = packed.tensor_split((num_heads, num_heads + kv_heads), dim=1)
        angles = None if self.rotation is None else backend.operators.angles(self.rotation, context.positions)
        output = PagedAttention(backend, self.group, self.spec)(query, key, value, context, angles, norm=self.norm)
        return list(torch.split(output, [end - first for _, first, end in spans]))

    def expected(self, span: Span) -> Tensor:
        """Plain attention in float64."""
        seq, first, end = span
        num_heads, kv_heads = self.case["heads"]
        query, key, value = torch.split(self.qkv[seq][:end].double(), (num_heads, kv_heads, kv_heads), dim=1)
        if self.norm is not None:
            query = normed(query, self.norm.query_weight, self.norm.eps)
            key = normed(key, self.norm.key_weight, self.norm.eps)
        if self.rotation is not None:
            query, key = rotated(query, self.rotation), rotated(key, self.rotation)
        key, value = (x.repeat_interleave(num_heads // kv_heads, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.spec.scale
        if self.spec.soft_cap is not None:
            scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
        places = torch.arange(end)
        hidden = places > places[:, None]
        if self.spec.window is not None:
            hidden |= places <= places[:, None] - self.spec.window
        scores = scores.masked_fill(hidden, -math.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double().view(-1, 1, 1).expand(-1, end, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :end]
        return torch.einsum("hqk,khd->qhd", weights, value)[first:].flatten(1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(tokens, heads, head_dim) float64 / rms * weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """(tokens, heads, head_dim) from position 0 on, rotated as complex numbers."""
    dim = rotation.rotary_dim
    cos, sin = rotation.cos_sin[: len(x), None].double().chunk(2, dim=-1)
    turning = x[..., :dim]
    pairs = turning.view(*x.shape[:2], -1, 2) if rotation.interleaved else torch.stack(turning.chunk(2, dim=-1), -1)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    turned = turned.flatten(-2) if rotation.interleaved else torch.cat(turned.unbind(-1), dim=-1)
    return torch.cat((turned, x[..., dim:]), dim=-1)


def make_backend(name: str, shapes: Sequence[CacheShape], device: torch.device) -> Backend:
    """By a name: torch, deterministic torch, native or triton."""
    option = {"native": "auto", "deterministic torch": "torch"}.get(name, name)
    backend = select_backend(option, shapes, device, deterministic=name == "deterministic torch")
    assert backend.name == name, f"{name} is not available, got {backend.name}"
    return backend


def fill_with_nan(store: KVStore) -> None:
    """Make every element of a cache NaN, and every scale."""
    for part in store.parts:
        part.fill_(_NAN_BYTE if part.dtype == torch.uint8 else math.nan)


def outputs_in_chunks(seqs: Sequences, backend: Backend, borders: list[int]) -> list[Tensor]:
    """Outputs of all tokens of the sequences, computed in chunks between borders, single tokens as decodes. What they
    must not read is NaN.
    """
    backend.store.allocate(seqs.num_blocks)
    fill_with_nan(backend.store)
    outputs: list[list[Tensor]] = [[] for _ in seqs.lengths]
    for begin, end in pairwise(borders):
        spans: list[Span] = [
            (seq, begin, min(end, length)) for seq, length in enumerate(seqs.lengths) if begin < length
        ]
        spans.sort(key=lambda span: span[2] - span[1] == 1)
        context = backend.prepare_step([seqs.batch(spans, sum(last - first > 1 for _, first, last in spans))])
        for (seq, _, _), output in zip(spans, seqs.attend(backend, context, spans), strict=True):
            outputs[seq].append(output)
    return [torch.cat(parts) for parts in outputs]


def check_case(case: Case, device: torch.device) -> None:
    """Run all steps of a case; AssertionError where a backend and plain attention differ."""
    seqs = Sequences(case, LENGTHS)
    backend = make_backend(case["backend"], [seqs.shape], device)
    backend.store.allocate(seqs.num_blocks)
    fill_with_nan(backend.store)
    tolerance = TOLERANCES[case["dtype"]] + CACHE_TOLERANCES[case.get("cache", "auto")]
    for spans, num_prefills in STEPS:
        seqs.forget(backend, spans)
        context = backend.prepare_step([seqs.batch(spans, num_prefills)])
        for output, span in zip(seqs.attend(backend, context, spans), spans, strict=True):
            expected = seqs.expected(span)
            torch.testing.assert_close(
                output.double().cpu(), expected, atol=tolerance, rtol=tolerance, msg=lambda text, s=span: f"{s}: {text}"
            )
