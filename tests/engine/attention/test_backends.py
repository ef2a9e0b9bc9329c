"""Every backend that runs on a CPU attends as plain attention in float64 does, and reads nothing that it must not.

All that must not show in a step's result is NaN: blocks that no sequence owns, tokens behind every window, and what has
not been written of a sequence's last block. Table entries of blocks that are not read are -1.

The C++ kernels are compiled for each size of a head: `make test` has those of 16, 32 and 80 elements (five vectors, the
last pair of them half empty) at this machine's best level of instructions.
"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise as neighbours
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from kernels.cases import case_id
from pagestream_engine import ConfigError
from pagestream_engine.attention import (
    AttentionBatch,
    AttentionSpec,
    Backend,
    CacheShape,
    HeadNorm,
    KVStore,
    Operators,
    PagedAttention,
    Rotation,
    StepContext,
    select_backend,
)
from pagestream_engine.attention.base import LayerCache
from pagestream_engine.attention.native import attention as native
from pagestream_engine.attention.native.attention import NativeKernels, PagedLayer
from pagestream_engine.attention.native.levels import LEVELS, AttentionLevel, library_for
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.native_build import cached, find_compiler
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise
from torch import Tensor

CPU = torch.device("cpu")
ON_CPU = ("torch", "deterministic torch", "native") if find_compiler() else ("torch", "deterministic torch")
EXACT = tuple(name for name in ON_CPU if name != "torch")
pytestmark = pytest.mark.builds
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Inputs are standard normal: a few roundings of the dtype."""
CACHE_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
CACHE_TOLERANCES = {"auto": 0.0, "bfloat16": 3e-2, "fp8": 0.25}
"""What rounding keys and values to the cache's dtype adds: float8 is off by up to a sixteenth of an element."""

FACTORS: Mapping[str, Sequence[Any]] = {
    "dtype": tuple(DTYPES),
    "head_dim": (16, 80),
    "heads": ((4, 4), (6, 2), (8, 1)),
    "block_size": (8, 16, 32),
    "window": (None, 1, 5, 16, 37),
    "soft_cap": (None, 3.0),
    "sinks": (False, True),
    "slopes": (None, "exact", "rounded"),
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
        slopes = torch.rand(num_heads, generator=torch.Generator().manual_seed(num_heads)) / 8
        self.slopes = slopes if self.case.get("slopes") else None
        self.rounds = self.case.get("slopes") == "rounded"
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
        of_slopes = {"slopes": self.slopes, "rounds_slopes": self.rounds}
        return AttentionSpec(*case["heads"], case["head_dim"], scale, window, soft_cap, self.sinks, **of_slopes)

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
                for pages in backend.store.layers[self.group]:
                    rows = pages.view(torch.uint8) if backend.store.has_scales else pages
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
        if self.slopes is not None and self.rounds:
            scores = scores + (self.slopes[:, None, None] * places).bfloat16().double()
        elif self.slopes is not None:
            scores = scores + self.slopes.double()[:, None, None] * (places - places[:, None])
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


def make_backend(name: str, shapes: Sequence[CacheShape]) -> Backend:
    """By a name: torch, deterministic torch, native, triton or deterministic triton."""
    option = {"native": "auto"}.get(name, name.removeprefix("deterministic "))
    backend = select_backend(option, shapes, CPU, deterministic=name.startswith("deterministic"))
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
    for begin, end in neighbours(borders):
        spans: list[Span] = [
            (seq, begin, min(end, length)) for seq, length in enumerate(seqs.lengths) if begin < length
        ]
        spans.sort(key=lambda span: span[2] - span[1] == 1)
        context = backend.prepare_step([seqs.batch(spans, sum(last - first > 1 for _, first, last in spans))])
        for (seq, _, _), output in zip(spans, seqs.attend(backend, context, spans), strict=True):
            outputs[seq].append(output)
    return [torch.cat(parts) for parts in outputs]


def check_case(case: Case) -> None:
    """Run all steps of a case; AssertionError where a backend and plain attention differ."""
    seqs = Sequences(case, LENGTHS)
    backend = make_backend(case["backend"], [seqs.shape])
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


# -- results ------------------------------------------------------------------------------------------------------

COVER = pairwise({"backend": ON_CPU, **FACTORS})
OTHER_CACHES = [
    {**case, "cache": cache}
    for cache in ("fp8", "bfloat16")
    for case in pairwise({"backend": ON_CPU, **FACTORS, "head_dim": (16,)})
]
"""Caches of another dtype than the model's; the C++ kernels are compiled for each."""


@pytest.mark.parametrize("case", COVER, ids=case_id)
def test_attends_as_plain_attention_does(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case_id(case), marks=pytest.mark.slow if case["cache"] == "bfloat16" else ())
        for case in OTHER_CACHES
    ],
)
def test_attends_to_a_cache_of_another_dtype(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize(("head_dim", "heads", "block_size"), [(256, (2, 1), 64), (48, (7, 7), 1), (64, (8, 1), 16)])
def test_other_sizes_of_heads_and_blocks(name: str, head_dim: int, heads: tuple[int, int], block_size: int) -> None:
    sizes = {"head_dim": head_dim, "heads": heads, "block_size": block_size}
    check_case({**PLAIN, **sizes, "backend": name, "dtype": "bfloat16"})


PLAIN = {"dtype": "float32", "window": None, "soft_cap": None, "sinks": False, "rotation": "neox", "scale": None}


@pytest.mark.parametrize("name", ON_CPU)
def test_groups_of_several_shapes_share_the_blocks(name: str) -> None:
    """Two layers with tables of their own, of which one takes a part of each page."""
    pool = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    large = Sequences({**PLAIN, "head_dim": 32, "heads": (6, 2), "block_size": 8}, LENGTHS, 0, pool)
    small = Sequences({**PLAIN, "head_dim": 16, "heads": (4, 1), "block_size": 16, "window": 20}, LENGTHS, 1, pool)
    backend = make_backend(name, [large.shape, small.shape])
    backend.store.allocate(60)
    backend.store.cache.fill_(math.nan)
    spans: list[Span] = [(2, 0, 30), (3, 0, 70)]
    last: list[Span] = [(2, 30, 31), (3, 70, 71)]
    for step, num_prefills in ((spans, 2), (last, 0)):
        context = backend.prepare_step([seqs.batch(step, num_prefills) for seqs in (large, small)])
        for seqs in (large, small):
            for output, span in zip(seqs.attend(backend, context, step), step, strict=True):
                torch.testing.assert_close(output.double(), seqs.expected(span), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ON_CPU)
def test_forked_sequences_share_full_blocks_and_part_by_copies_of_the_last_one(name: str) -> None:
    """The first 21 tokens are the same three times, in blocks of 8: two full ones are shared, the third is copied."""
    seqs = Sequences({**PLAIN, "head_dim": 32, "heads": (4, 2), "block_size": 8}, (27, 27, 27))
    for other in (1, 2):
        seqs.qkv[other][:21] = seqs.qkv[0][:21]
        seqs.tables[other][:2] = seqs.tables[0][:2]
    backend = make_backend(name, [seqs.shape])
    backend.store.allocate(seqs.num_blocks)
    steps: list[tuple[list[Span], int]] = [([(0, 0, 21)], 1)]
    steps += [([(seq, end - 1, end) for seq in range(3)], 0) for end in range(22, 27)]
    for spans, num_prefills in steps:
        context = backend.prepare_step([seqs.batch(spans, num_prefills)])
        for output, span in zip(seqs.attend(backend, context, spans), spans, strict=True):
            torch.testing.assert_close(output.double(), seqs.expected(span), atol=2e-5, rtol=2e-5)
        if num_prefills:
            backend.store.copy_blocks([(seqs.tables[0][2], seqs.tables[other][2]) for other in (1, 2)])


@pytest.mark.parametrize("name", ON_CPU)
def test_a_copy_reads_all_sources_before_it_writes(name: str) -> None:
    store = make_backend(name, [CacheShape((0, 1), 1, 16, 4, torch.float32)]).store
    store.allocate(5)
    for layer, caches in store.layers.items():
        for kind, pages in enumerate(caches):
            for block in range(5):
                pages[block] = 100 * layer + 10 * kind + block
    store.copy_blocks([(0, 1), (1, 3)])
    for layer, caches in store.layers.items():
        for kind, pages in enumerate(caches):
            held = [pages[block].unique().tolist() for block in range(5)]
            assert held == [[100 * layer + 10 * kind + block] for block in (0, 0, 2, 1, 4)]


@pytest.mark.parametrize("name", ON_CPU)
def test_scores_of_any_size_do_not_overflow(name: str) -> None:
    seqs = Sequences({**PLAIN, "head_dim": 16, "heads": (1, 1), "block_size": 16}, (40,))
    seqs.qkv[0][:, :2] *= 60
    output = outputs_in_chunks(seqs, make_backend(name, [seqs.shape]), [0, 39, 40])[0]
    torch.testing.assert_close(output.double(), seqs.expected((0, 0, 40)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("turns", [False, True], ids=["unrotated", "rotated"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 24), (32, 8), (24, 32), (32, 32)])
def test_a_layer_takes_heads_of_other_sizes_and_layouts(name: str, turns: bool, head_dim: int, value_dim: int) -> None:
    tokens, heads, kv_heads = 21, 4, 2
    backend = make_backend(name, [CacheShape((3,), kv_heads, 32, 8, torch.float32)])
    backend.store.allocate(4)
    backend.store.cache.fill_(math.nan)
    # Heads lie before tokens, as transformers' modelling code has them.
    query, key = (torch.randn(count, tokens, head_dim).transpose(0, 1) for count in (heads, kv_heads))
    value = torch.randn(kv_heads, tokens, value_dim).transpose(0, 1)
    angles = torch.outer(torch.arange(float(tokens)), 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim))
    rotation = Rotation(torch.cat((angles.cos(), angles.sin()), dim=1))
    turned = [rotated(x.double(), rotation) if turns else x.double() for x in (query, key)]
    q, k, v = (x.transpose(0, 1) for x in (*turned, value.double()))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)

    positions = torch.arange(tokens)
    blocks = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    slots = blocks[0, positions // 8].long() * 8 + positions % 8
    context = backend.prepare_step([AttentionBatch(positions, slots, blocks, torch.tensor([0]), [tokens], [tokens], 1)])
    layer = PagedAttention(backend, 3, AttentionSpec(heads, kv_heads, 32, scale=0.2))
    made = layer(query, key, value, context, backend.operators.angles(rotation, positions) if turns else None)
    assert made.shape == (tokens, heads * value_dim)
    torch.testing.assert_close(made.double(), expected.transpose(0, 1).flatten(1), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(4, dtype=torch.float16), torch.zeros(8)[::2]])
def test_sinks_of_another_kind_are_refused(sinks: Tensor) -> None:
    backend = make_backend("torch", [CacheShape((0,), 2, 16, 8, torch.float32)])
    for name in ("sinks", "slopes"):
        with pytest.raises(ValueError, match=rf"{name}: given .*, expected contiguous torch.float32 of shape \(4,\)"):
            PagedAttention(backend, 0, AttentionSpec(4, 2, 16, 0.25, **{name: sinks}))


# -- bits ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


LEVELS_HERE = [level for level in LEVELS.get(platform.machine(), ()) if level.flags <= instruction_sets(read_cpuinfo())]


@pytest.fixture(
    params=[None, *(pytest.param(level, marks=pytest.mark.slow) for level in LEVELS_HERE)],
    ids=lambda level: "this machine's" if level is None else level.name,
)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of this machine, then in its place that of each level that an image brings and runs here."""
    given: AttentionLevel | None = request.param
    if given is not None:
        monkeypatch.setattr(native, "load_library", lambda head_dim, *_: library_of(head_dim, given))


@cache
def library_of(head_dim: int, level: AttentionLevel) -> ctypes.CDLL:
    return ctypes.CDLL(str(cached(library_for(head_dim, level))))


LONG = (700, 530, 40)
BORDERS = [0, 7, 250, 255, 256, 257, 258, 300, 511, 512, 513, 515, 697, 698, 699, 700]
"""Chunks, decodes (one token), and both around the segments' borders at 256 and 512."""
LONG_OPTIONS = {
    "dtype": ("float32", "bfloat16", "float16"),
    "heads": ((6, 2), (8, 1), (3, 3)),
    "window": (None, 20, 300),
    "soft_cap": (None, 3.0),
    "sinks": (False, True),
    "slopes": (None, "exact", "rounded"),
}
LONG_SHAPE = {"head_dim": 80, "block_size": 16, "rotation": None}
EXACT_OPTIONS = pairwise(
    {
        "name": EXACT,
        "dtype": ("float32", "float16", "bfloat16"),
        "window": (None, 1, 20),
        "soft_cap": (None, 3.0),
        "sinks": (False, True),
        "slopes": (None, "exact", "rounded"),
    }
)


@pytest.mark.parametrize("case", EXACT_OPTIONS, ids=case_id)
def test_bits_of_a_deterministic_backend_depend_on_the_sequence_alone(case: Case) -> None:
    sizes = {"head_dim": 32, "heads": (6, 2), "block_size": 8, "scale": None}
    seqs = Sequences({**case, **sizes, "rotation": "neox"}, LENGTHS)
    backend = make_backend(case["name"], [seqs.shape])
    assert backend.is_deterministic
    expected = outputs_in_chunks(seqs, backend, [0, 90])
    cut = outputs_in_chunks(seqs, backend, [0, 7, 8, 25, 41, 42, 43, 80, 90])
    for whole, parts in zip(expected, cut, strict=True):
        assert torch.equal(whole, parts)


@needs_compiler
@pytest.mark.parametrize("case", pairwise(LONG_OPTIONS), ids=case_id)
def test_chunks_decodes_threads_and_neighbours_change_no_bit_of_long_contexts(level: None, case: Case) -> None:
    seqs = Sequences({**case, **LONG_SHAPE, "scale": None}, LONG)
    backend = make_backend("native", [seqs.shape])
    torch.set_num_threads(1)
    together = outputs_in_chunks(seqs, backend, [0, 700])
    tolerance = TOLERANCES[case["dtype"]]
    for seq, output in enumerate(together):
        expected = seqs.expected((seq, 0, LONG[seq]))
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.set_num_threads(3)
    for whole, parts in zip(together, outputs_in_chunks(seqs, backend, BORDERS), strict=True):
        assert torch.equal(whole, parts)


@needs_compiler
def test_a_context_is_divided_among_more_threads_than_kv_heads(level: None) -> None:
    """A single sequence with one KV head: its segments are tasks of their own where there are several threads."""
    # float32: rounding to less would hide sums that differ.
    seqs = Sequences({**PLAIN, **LONG_SHAPE, "heads": (4, 1), "sinks": True}, (1500,))
    backend = make_backend("native", [seqs.shape])
    outputs = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        outputs.append(outputs_in_chunks(seqs, backend, [0, *range(1490, 1501)])[0])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@needs_compiler
def test_decodes_in_bfloat16_have_the_bits_of_a_prompt(level: None) -> None:
    """Large scores, whose errors are large: with usual ones, rounding to bfloat16 hides sums that differ."""
    seqs = Sequences({**PLAIN, **LONG_SHAPE, "dtype": "bfloat16", "heads": (6, 2), "scale": 3.0}, (560, 540))
    backend = make_backend("native", [seqs.shape])
    torch.set_num_threads(1)
    whole = outputs_in_chunks(seqs, backend, [0, 560])
    decoded = outputs_in_chunks(seqs, backend, [0, 300, *range(500, 561)])
    for expected, actual in zip(whole, decoded, strict=True):
        assert torch.equal(expected, actual)


@needs_compiler
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_reaches_only_who_sees_it(
    level: None, dtype: torch.dtype, window: int | None, value: float
) -> None:
    """Blocks of a prompt that are computed before such a token are shared: another's failure must not be in them."""
    num_tokens, at, dim = 40, 23, 80
    keys, values = torch.randn(2, 1, 2, 64, dim).to(dtype)
    values[0, 1, at, 7] = value
    query = torch.randn(num_tokens, 4, dim).to(dtype)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=dim, scale=dim**-0.5, window=window)
    layer = PagedLayer(LayerCache(keys, values), torch.zeros(1, 1, dtype=torch.int32), spec)
    kernels = NativeKernels(native.load_library(dim), dtype)
    together, alone = torch.empty_like(query), torch.empty_like(query)
    kernels.attend(together, query, layer, torch.tensor([[0, 0, 0, num_tokens]]))
    kernels.attend(alone, query, layer, torch.tensor([[0, token, token, 1] for token in range(num_tokens)]))
    sees = [token for token in range(num_tokens) if at <= token and (window is None or token < at + window)]
    expected = torch.zeros(num_tokens, 4, dim, dtype=torch.bool)
    expected[sees, 2:, 7] = True
    assert torch.equal(together.isfinite(), ~expected)
    assert torch.equal(together.nan_to_num(posinf=1.0), alone.nan_to_num(posinf=1.0))


# -- norms and activations ----------------------------------------------------------------------------------------

OPERATOR_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5
each_operator = pytest.mark.parametrize(
    "case",
    pairwise({"name": ON_CPU, "dtype": tuple(OPERATOR_TOLERANCES), "shape": ((1, 16), (3, 100), (70, 768))}),
    ids=case_id,
)


def operators_of(case: Case) -> Operators:
    return make_backend(case["name"], [CacheShape((0,), 1, 16, 16, case["dtype"])]).operators


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = OPERATOR_TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@each_operator
def test_norms(case: Case) -> None:
    operators, dtype, (rows, dim) = operators_of(case), case["dtype"], case["shape"]
    x, residual = torch.randn(2, rows, dim).to(dtype).unbind(0)
    for weight in (torch.randn(dim).to(dtype), torch.randn(dim)):
        assert_near(operators.rms_norm(x, weight, EPS), F.rms_norm(x.double(), (dim,), weight.double(), EPS))
        normed_sum, total = operators.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
        assert_near(total, x.double() + residual.double())
        assert_near(normed_sum, F.rms_norm(total.double(), (dim,), weight.double(), EPS))
    heads, weight = torch.randn(rows, 7, dim).to(dtype)[:, 2:5], torch.randn(dim).to(dtype)
    assert_near(operators.rms_norm(heads, weight, EPS), F.rms_norm(heads.double(), (dim,), weight.double(), EPS))


@each_operator
def test_layer_norms(case: Case) -> None:
    operators, dtype, (rows, dim) = operators_of(case), case["dtype"], case["shape"]
    x, residual = (5.0 + torch.randn(2, rows, dim)).to(dtype).unbind(0)
    for bias in (None, torch.randn(dim).to(dtype)):
        weight = torch.randn(dim).to(dtype)
        of_double = (weight.double(), None if bias is None else bias.double(), EPS)
        assert_near(operators.layer_norm(x, weight, bias, EPS), F.layer_norm(x.double(), (dim,), *of_double))
        normed_sum, total = operators.add_layer_norm(x.clone(), residual.clone(), weight, bias, EPS)
        assert_near(total, x.double() + residual.double())
        assert_near(normed_sum, F.layer_norm(total.double(), (dim,), *of_double))
    heads, weight, bias = torch.randn(rows, 7, dim).to(dtype)[:, 2:5], *torch.randn(2, 3, dim).to(dtype).unbind(0)
    expected = F.layer_norm(heads.double(), (dim,), eps=EPS) * weight.double() + bias.double()
    assert_near(operators.layer_norm(heads, weight, bias, EPS), expected)


@each_operator
def test_gated_activations(case: Case) -> None:
    operators, dtype, (rows, dim) = operators_of(case), case["dtype"], case["shape"]
    gate_up = torch.cat((torch.randn(rows, dim) * 6, torch.randn(rows, dim)), dim=1).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_near(operators.silu_and_mul(gate_up), F.silu(gate) * up)
    assert_near(operators.gelu_and_mul(gate_up, tanh=False), F.gelu(gate) * up)
    assert_near(operators.gelu_and_mul(gate_up, tanh=True), F.gelu(gate, approximate="tanh") * up)
    for activation, expected in (("silu", F.silu(gate)), ("gelu", F.gelu(gate))):
        assert_near(operators.activate(gate.to(dtype), activation), expected)
    assert_near(operators.activate(gate.to(dtype), "gelu_tanh"), F.gelu(gate, approximate="tanh"))


@pytest.mark.parametrize("name", EXACT)
def test_activations_are_accurate_over_their_range_and_a_rows_bits_its_own(name: str) -> None:
    """What makes them has exponentials, hyperbolic tangents and error functions of its own."""
    operators = operators_of({"name": name, "dtype": torch.float32})
    gates = torch.cat(
        (torch.linspace(-87, 88, 60_001), torch.linspace(-12, 12, 40_001), torch.tensor([0.0, -0.0, 1e-30]))
    )
    rows = gates[: len(gates) // 5 * 5].view(-1, 5)
    gate_up = torch.cat((rows, torch.ones_like(rows)), dim=1)
    exact = rows.double()
    for apply, expected in (
        (operators.silu_and_mul, F.silu(exact)),
        (lambda x: operators.gelu_and_mul(x, tanh=False), F.gelu(exact)),
        (lambda x: operators.gelu_and_mul(x, tanh=True), F.gelu(exact, approximate="tanh")),
    ):
        whole = apply(gate_up)
        torch.testing.assert_close(whole.double(), expected, atol=5e-6, rtol=4e-6)
        for part, wanted in zip(gate_up.split(13)[:200], whole.split(13), strict=False):
            assert torch.equal(apply(part), wanted)


# -- the choice, and the cache's memory ---------------------------------------------------------------------------


def test_which_backend_a_cpu_has() -> None:
    def chosen(name: str, head_dim: int, dtype: torch.dtype, *, deterministic: bool = False) -> str:
        return select_backend(name, [CacheShape((0,), 1, head_dim, 16, dtype)], CPU, deterministic=deterministic).name

    best = "native" if find_compiler() else "torch"
    exact = "native" if find_compiler() else "deterministic torch"
    for dtype in (torch.bfloat16, torch.float16):
        assert chosen("auto", 16, dtype) == best
        assert chosen("auto", 16, dtype, deterministic=True) == exact
    assert chosen("torch", 16, torch.bfloat16) == "torch"
    assert chosen("torch", 16, torch.bfloat16, deterministic=True) == "deterministic torch"
    assert chosen("auto", 24, torch.float32) == "torch"
    assert chosen("auto", 24, torch.float16, deterministic=True) == "deterministic torch"
    with pytest.raises(ConfigError, match=r"^deterministic: given True, .* by torch on a GPU"):
        select_backend("torch", [CacheShape((0,), 1, 16, 16, torch.float16)], torch.device("cuda"), deterministic=True)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET") as caught:
        select_backend("triton", [CacheShape((0,), 1, 64, 16, torch.float32)], CPU)
    assert caught.value.field == "attention_backend"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_the_cache_is_a_private_mapping_of_which_linux_makes_large_pages() -> None:
    store = KVStore([CacheShape((0,), 1, 64, 16, torch.float32)], CPU)
    store.allocate(3000)
    address = store.cache.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        begin, end = (int(part, 16) for part in addresses.split("-"))
        if begin <= address < end:
            assert permissions == "rw-p"
            return
    pytest.fail("the cache is not mapped")


# -- by Triton's interpreter --------------------------------------------------------------------------------------

FEWER = {"head_dim": (16, 80), "block_size": (8, 32), "window": (None, 5, 37)}
"""The interpreter takes half a minute for each. What the kernels do for each shape is tests/kernels' to show."""
FLOAT8_TRITON = {"backend": "triton", "cache": "fp8", "dtype": "bfloat16", "head_dim": 16, "heads": (6, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise({**FACTORS, **FEWER}), ids=case_id)
def test_triton_attends_as_plain_attention_does(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run(check_case, {"backend": "triton", **case})


@pytest.mark.slow
@pytest.mark.parametrize("rotation", ["interleaved", None])
def test_triton_attends_to_a_cache_of_float8(interpreter: KernelWorker, rotation: str | None) -> None:
    options = {"block_size": 64, "window": 37, "soft_cap": None, "sinks": True, "scale": None, "rotation": rotation}
    interpreter.run(check_case, {**FLOAT8_TRITON, **options})
