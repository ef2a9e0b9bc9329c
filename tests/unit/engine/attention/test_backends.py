"""Every backend that runs on a CPU attends as a plain softmax over each sequence's tokens does."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from pagestream_engine.attention import AttentionBatch, AttentionSpec, Backend, CacheShape, Rotation, select_backend
from pagestream_engine.errors import ConfigError
from pagestream_engine.layers.attention import PagedAttention
from pagestream_engine.native_build import find_compiler
from torch import Tensor

_POSITIONS = 512
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

_CPU = torch.device("cpu")
SIZES = [(256, 2, 1, 64), (48, 7, 7, 1)]
"""Sizes of a head, heads, KV heads and tokens of a block, beside those of test_conformance.py. The C++ kernels are
compiled for each size of a head.
"""

Make = Callable[[CacheShape], Backend]


def _shape(
    num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype = torch.float32
) -> CacheShape:
    return CacheShape(tuple(range(num_layers)), num_kv_heads, head_dim, block_size, dtype)


def _cos_sin(head_dim: int) -> Tensor:
    angles = torch.outer(torch.arange(float(_POSITIONS)), 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _native(shape: CacheShape) -> Backend:
    backend = select_backend("auto", [shape], _CPU)
    if backend.name != "native":
        pytest.skip("no C++ compiler")
    return backend


MAKERS: dict[str, Make] = {
    "torch": lambda shape: select_backend("torch", [shape], _CPU),
    "deterministic torch": lambda shape: select_backend("torch", [shape], _CPU, deterministic=True),
    "native": _native,
}


class Case:
    """Sequences with all their tokens' queries, keys and values, and tables that scatter them over the pool."""

    def __init__(self, shape: CacheShape, num_heads: int, seq_lens: list[int]) -> None:
        generator = torch.Generator().manual_seed(len(seq_lens) * 1000 + shape.head_dim + shape.block_size)
        self.shape, self.num_heads = shape, num_heads
        size = shape.block_size
        counts = [-(-length // size) for length in seq_lens]
        self.num_blocks = sum(counts) + 3
        ids = torch.randperm(self.num_blocks, generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        heads = num_heads + 2 * shape.num_kv_heads
        self.qkv = [
            torch.randn(length, heads, shape.head_dim, generator=generator).to(shape.dtype) for length in seq_lens
        ]

    def run(self, backend: Backend, spans: list[tuple[int, int, int]], num_prefills: int) -> list[Tensor]:
        """One step over spans (sequence, first token, end); each span's output (tokens, num_heads * head_dim)."""
        size = self.shape.block_size
        width = max(-(-end // size) for _, _, end in spans)
        rows = [self.tables[seq][: -(-end // size)] for seq, _, end in spans]
        positions = [range(first, end) for _, first, end in spans]
        slots = [[row[p // size] * size + p % size for p in span] for row, span in zip(rows, positions, strict=True)]
        batch = AttentionBatch(
            positions=torch.tensor([p for span in positions for p in span]),
            slots=torch.tensor([slot for span in slots for slot in span]),
            block_tables=torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32),
            table_rows=torch.arange(len(rows)),
            query_lens=[end - first for _, first, end in spans],
            seq_lens=[end for _, _, end in spans],
            num_prefills=num_prefills,
        )
        packed = torch.cat([self.qkv[seq][first:end] for seq, first, end in spans])
        kv_heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        spec = AttentionSpec(self.num_heads, kv_heads, dim, scale=dim**-0.5)
        rotation = Rotation(_cos_sin(dim))
        outputs = []
        for layer in self.shape.layers:
            query, key, value = packed.clone().tensor_split((self.num_heads, self.num_heads + kv_heads), dim=1)
            context = backend.prepare_step([batch])
            angles = backend.operators.angles(rotation, context.positions)
            outputs.append(PagedAttention(backend, layer, spec)(query, key, value, context, angles))
        assert torch.equal(outputs[0], outputs[-1])
        return list(outputs[0].split(batch.query_lens))

    def expected(self, seq: int, first: int, end: int) -> Tensor:
        """Plain causal attention in float64."""
        kv_heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        query, key, value = self.qkv[seq][:end].double().split((self.num_heads, kv_heads, kv_heads), dim=1)
        cos, sin = _cos_sin(dim)[:end, None].double().chunk(2, dim=-1)

        def rotate(x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        group = self.num_heads // kv_heads
        key, value = (x.repeat_interleave(group, dim=1) for x in (rotate(key), value))
        scores = torch.einsum("qhd,khd->hqk", rotate(query), key) / math.sqrt(dim)
        scores = scores.masked_fill(torch.ones(end, end).triu(1).bool(), -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)[first:].reshape(end - first, -1)


def _check(case: Case, outputs: list[Tensor], spans: list[tuple[int, int, int]]) -> None:
    tolerance = _TOLERANCE[case.shape.dtype]
    for output, span in zip(outputs, spans, strict=True):
        torch.testing.assert_close(output.double(), case.expected(*span), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_prefill_then_decode(name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    head_dim, num_heads, kv_heads, block_size = sizes
    case = Case(_shape(2, kv_heads, head_dim, block_size, dtype), num_heads, [1, 17, 40, 130])
    backend = MAKERS[name](case.shape)
    backend.store.allocate(case.num_blocks)
    prefill = [(0, 0, 1), (1, 0, 16), (2, 0, 39), (3, 0, 129)]
    _check(case, case.run(backend, prefill, 4), prefill)
    decode = [(1, 16, 17), (2, 39, 40), (3, 129, 130)]
    _check(case, case.run(backend, decode, 0), decode)


@pytest.mark.parametrize("name", ["deterministic torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(80, 8, 1, 16), *SIZES])
def test_a_deterministic_backends_bits_depend_on_the_sequence_alone(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    head_dim, num_heads, kv_heads, block_size = sizes
    lengths = [90, 33, 5]
    case = Case(_shape(1, kv_heads, head_dim, block_size, dtype), num_heads, lengths)
    backend = MAKERS[name](case.shape)
    assert backend.is_deterministic
    backend.store.allocate(case.num_blocks)
    expected = [case.run(backend, [(seq, 0, length)], 1)[0] for seq, length in enumerate(lengths)]
    backend.store.allocate(case.num_blocks)
    for begin, end in pairwise([0, 7, 8, 25, 41, 42, 43, 80, 90]):
        # All that go on, the single tokens as decodes; the sequences' ends leave neighbours of every kind.
        spans = [(seq, begin, min(end, length)) for seq, length in enumerate(lengths) if begin < length]
        spans.sort(key=lambda span: span[2] - span[1] == 1)
        prefills = sum(last - first > 1 for _, first, last in spans)
        for (seq, first, last), output in zip(spans, case.run(backend, spans, prefills), strict=True):
            assert torch.equal(output, expected[seq][first:last]), f"sequence {seq} from {first} to {last}"


@pytest.mark.parametrize("name", MAKERS)
def test_chunks_and_decodes_in_one_step(name: str) -> None:
    case = Case(_shape(1, 2, 32, 8, torch.float32), 6, [60, 33, 9, 50])
    backend = MAKERS[name](case.shape)
    backend.store.allocate(case.num_blocks)
    first = [(0, 0, 23), (1, 0, 32), (2, 0, 8)]
    _check(case, case.run(backend, first, 3), first)
    mixed = [(0, 23, 47), (3, 0, 50), (1, 32, 33), (2, 8, 9)]
    _check(case, case.run(backend, mixed, 2), mixed)
    last = [(0, 47, 60)]
    _check(case, case.run(backend, last, 1), last)


@pytest.mark.parametrize("name", MAKERS)
def test_chunked_prefill_equals_whole(name: str) -> None:
    case = Case(_shape(1, 2, 64, 16, torch.float32), 4, [100])
    outputs = []
    for borders in ([0, 100], [0, 1, 17, 48, 99, 100]):
        backend = MAKERS[name](case.shape)
        backend.store.allocate(case.num_blocks)
        spans = [(0, first, end) for first, end in pairwise(borders)]
        outputs.append(torch.cat([case.run(backend, [span], 1)[0] for span in spans]))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MAKERS)
def test_shared_blocks_have_several_readers(name: str) -> None:
    case = Case(_shape(1, 1, 16, 8, torch.float32), 2, [25, 25])
    case.qkv[1][:16] = case.qkv[0][:16]
    case.tables[1][:2] = case.tables[0][:2]
    backend = MAKERS[name](case.shape)
    backend.store.allocate(case.num_blocks)
    case.run(backend, [(0, 0, 24)], 1)
    chunk = [(1, 16, 24)]
    _check(case, case.run(backend, chunk, 1), chunk)
    both = [(0, 24, 25), (1, 24, 25)]
    _check(case, case.run(backend, both, 0), both)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forked_sequences_part_by_copies_of_their_last_block(name: str, dtype: torch.dtype) -> None:
    """The first 21 tokens are the same three times, in blocks of 8: two full ones are shared, the third is copied."""
    case = Case(_shape(2, 2, 32, 8, dtype), 4, [27, 27, 27])
    for other in (1, 2):
        case.qkv[other][:21] = case.qkv[0][:21]
        case.tables[other][:2] = case.tables[0][:2]
    backend = MAKERS[name](case.shape)
    backend.store.allocate(case.num_blocks)
    case.run(backend, [(0, 0, 21)], 1)
    backend.store.copy_blocks([(case.tables[0][2], case.tables[other][2]) for other in (1, 2)])
    for end in range(22, 27):
        decode = [(seq, end - 1, end) for seq in range(3)]
        _check(case, case.run(backend, decode, 0), decode)


@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_reads_all_sources_before_it_writes(name: str) -> None:
    backend = MAKERS[name](_shape(2, 1, 16, 4, torch.float32))
    backend.store.allocate(5)
    for layer, caches in backend.store.layers.items():
        for kind, cache in enumerate(caches):
            for block in range(5):
                cache[block] = 100 * layer + 10 * kind + block
    backend.store.copy_blocks([(0, 1), (1, 3)])
    for layer, caches in backend.store.layers.items():
        for kind, cache in enumerate(caches):
            held = [cache[block].unique().tolist() for block in range(5)]
            assert held == [[100 * layer + 10 * kind + block] for block in (0, 0, 2, 1, 4)]


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_block_held_before_is_never_seen(name: str) -> None:
    case = Case(_shape(1, 2, 32, 16, torch.float32), 4, [20, 5])
    backend = MAKERS[name](case.shape)
    backend.store.allocate(case.num_blocks)
    backend.store.cache.fill_(math.nan)
    prefill = [(0, 0, 19), (1, 0, 4)]
    _check(case, case.run(backend, prefill, 2), prefill)
    decode = [(0, 19, 20), (1, 4, 5)]
    _check(case, case.run(backend, decode, 0), decode)


def test_scores_of_any_size_do_not_overflow() -> None:
    for name, make in MAKERS.items():
        case = Case(_shape(1, 1, 16, 16, torch.float32), 1, [40])
        case.qkv[0][:, :2] *= 60
        backend = make(case.shape)
        backend.store.allocate(case.num_blocks)
        case.run(backend, [(0, 0, 39)], 1)
        output = case.run(backend, [(0, 39, 40)], 0)[0]
        torch.testing.assert_close(output.double(), case.expected(0, 39, 40), atol=1e-3, rtol=1e-3, msg=name)


def _chosen(name: str, shape: CacheShape, *, deterministic: bool = False) -> str:
    return select_backend(name, [shape], _CPU, deterministic=deterministic).name


def test_auto_on_a_cpu() -> None:
    expected = "native" if find_compiler() else "torch"
    assert _chosen("auto", _shape(1, 1, 64, 16, torch.bfloat16)) == expected
    assert _chosen("torch", _shape(1, 1, 64, 16, torch.bfloat16)) == "torch"
    assert _chosen("auto", _shape(1, 1, 64, 16, torch.float16)) == expected
    assert _chosen("auto", _shape(1, 1, 24, 16, torch.float32)) == "torch"


def test_deterministic_on_a_cpu() -> None:
    expected = "native" if find_compiler() else "deterministic torch"
    shape = _shape(1, 1, 64, 16, torch.bfloat16)
    assert _chosen("auto", shape, deterministic=True) == expected
    assert _chosen("torch", shape, deterministic=True) == "deterministic torch"
    assert _chosen("auto", _shape(1, 1, 24, 16, torch.float16), deterministic=True) == "deterministic torch"
    with pytest.raises(ConfigError, match=r"^deterministic: given True, .* by torch on a GPU"):
        select_backend("torch", [shape], torch.device("cuda"), deterministic=True)
