"""Kernels against their references, one case at a time: interpreted by tests/kernels, on a GPU by tests/gpu.

A case is a plain dict (it travels to a worker process as JSON). Whatever a kernel must not read is NaN: the tail of a
sequence's last block and every block that no sequence owns; table entries past the length are -1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import pagestream_kernels as kernels
import torch
from support.pairwise import Case
from torch import Tensor

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Inputs are standard normal and references run in float32, so an error is a few roundings of the result's dtype: a
# half-precision kernel also rounds the softmax weights, and the interpreter cuts bfloat16 off where a GPU rounds: three
# cuts in a row (rms_norm with a residual) lose up to 3 / 128.
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2.4e-2}

EPS = 1e-2  # rms_norm's; large enough to be seen in the result
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 64, 128)
GROUP_SIZES = (1, 3, 4, 8, 32)
TABLES = ("own", "resident")
"""A table for each sequence, or rows of a table that has more."""
LAYOUTS = ("block-token-head-dim", "block-head-token-dim", "block-head-dim-token")  # order in memory, slowest first

PLAN_LENGTHS: Mapping[str, Sequence[int]] = {
    "empty": [0],
    "1": [1],
    "borders": [63, 64, 65, 0, 511, 512, 513],
    "padded": [900, *([1] * 7)],
    "many": [*range(0, 3000, 10)],  # more than are added up at a time
    "long": [131072, 0, 5],
}
PAGED_FACTORS: Mapping[str, Sequence[Any]] = {
    "head_dim": HEAD_DIMS,
    "group_size": GROUP_SIZES,
    "block_size": BLOCK_SIZES,
    "dtype": tuple(DTYPES),
    "layout": LAYOUTS,
}
OPTION_FACTORS: Mapping[str, Sequence[Any]] = {
    "window": (None, 1, 40),
    "soft_cap": (None, 2.0),
    "sinks": (False, True),
    "slopes": (None, "exact", "rounded"),
}
FACTORS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "paged_decode": {
        **PAGED_FACTORS,
        "lengths": ("1", "5", "123", "border", "mixed", "long"),
        "rows": ("1", "mixed"),
        "split_tokens": (None, 64, 256),
        "tables": TABLES,
        **OPTION_FACTORS,
    },
    "plan_decode": {
        "lengths": tuple(PLAN_LENGTHS),
        "rows": (None, 1, 16),
        "split_tokens": (None, 64, 512),
        "window": (None, 1, 100),
        "num_kv_heads": (1, 3, 8),
    },
    "paged_prefill": {
        **PAGED_FACTORS,
        **OPTION_FACTORS,
        "tables": TABLES,
        "chunks": ("empty", "1", "5", "123", "border", "prefix", "mixed"),
    },
    "rope_and_cache": {
        **PAGED_FACTORS,
        "tokens": (1, 5, 123),
        "rotary": ("full", "half"),
        "index": ("int32", "int64"),
        "angles": ("float32", "same"),
        "norm": (False, True),
        "interleaved": (False, True),
    },
    "rope_and_quantise": {
        "head_dim": (64, 80, 128),
        "group_size": (1, 3),
        "block_size": (64, 128),
        "dtype": tuple(DTYPES),
        "rotary": ("full", "half"),
        "norm": (False, True),
        "interleaved": (False, True),
    },
    "float8_attention": {
        "operator": ("decode", "rows", "prefill"),
        "head_dim": (64, 72, 80, 128),
        "group_size": (1, 3, 8),
        "block_size": (64, 128),
        "dtype": tuple(DTYPES),
        "window": (None, 40),
        "soft_cap": (None, 2.0),
        "sinks": (False, True),
        "slopes": (None, "exact", "rounded"),
    },
    "copy_blocks": {
        "page": (1, 16, 4096, 10000),
        "dtype": (*DTYPES, "uint8"),
        "pools": (1, 2),
        "index": ("int32", "int64"),
    },
    "rms_norm": {
        "shape": ((0, 64), (1, 64), (5, 123), (123, 768), (3, 4096), (5, 8, 128), (7, 3, 80)),
        "dtype": tuple(DTYPES),
        "residual": (False, True),
        "strided": (False, True),
    },
    "silu_and_mul": {
        "shape": ((0, 64), (1, 64), (5, 123), (123, 768), (3, 2048), (2, 5, 1000)),
        "dtype": tuple(DTYPES),
        "strided": (False, True),
    },
    "filter_and_draw": {
        "shape": ((0, 9), (1, 1), (5, 123), (3, 2048), (4, 5000)),
        "top_k": (False, True),
        "top_p": (False, True),
        "min_p": (False, True),
        "values": ("normal", "tied", "infinite", "equal"),
        "strided": (False, True),
    },
    "fixed_order_matmul": {
        "shape": ((0, 8, 8), (1, 64, 64), (5, 123, 100), (70, 40, 96), (66, 130, 128)),
        "dtype": tuple(DTYPES),
        "bias": (False, True),
        "strided": (False, True),
    },
    "int8_matmul": {
        "shape": ((0, 8, 64), (1, 64, 64), (5, 123, 100), (70, 40, 160)),
        "group": (None, 32, 64),
        "dtype": tuple(DTYPES),
        "bias": (False, True),
    },
    "add_lora": {
        "shape": ((75, (70, 16, 33)), (600, (130,))),
        "ranks": ("8", "mixed", "256"),
        "rows": ("1", "mixed"),
        "dtype": tuple(DTYPES),
    },
}


def case_id(case: Case) -> str:
    """A short name for test reports."""
    return "-".join(f"{name}={value}".replace(" ", "") for name, value in case.items())


def check(kernel: str, case: Case, device: str = "cpu") -> None:
    """Run one case; AssertionError when kernel and reference differ by more than the dtype's tolerance."""
    torch.manual_seed(zlib.crc32(case_id(case).encode()))
    CHECKS[kernel](case, torch.device(device))


def assert_close(actual: Tensor, expected: Tensor, case: Case) -> None:
    tolerance = TOLERANCES[case["dtype"]]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


# -- the paged cache of a case ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cache:
    key: Tensor  # (num_blocks, block_size, num_kv_heads, head_dim), in the case's memory layout
    value: Tensor
    tables: Tensor  # (num_seqs, max_blocks) int32


def num_kv_heads(case: Case) -> int:
    return 1 if case["group_size"] >= 32 else 2


def make_cache(case: Case, lengths: Sequence[int], device: torch.device) -> Cache:
    block_size, dtype = case["block_size"], DTYPES[case["dtype"]]
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    shuffled = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for index, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        blocks = torch.tensor([shuffled.pop() for _ in range(count)], dtype=torch.long)
        tables[index, :count] = blocks
        for position, block in enumerate(blocks.tolist()):
            written[block, : length - position * block_size] = True
    shape = (num_blocks, block_size, num_kv_heads(case), case["head_dim"])
    key, value = (torch.randn(shape).to(dtype).masked_fill(~written[:, :, None, None], float("nan")) for _ in range(2))
    return Cache(lay_out(key.to(device), case["layout"]), lay_out(value.to(device), case["layout"]), tables.to(device))


def lay_out(cache: Tensor, layout: str) -> Tensor:
    """The same tensor in another order of memory."""
    order = {"block": 0, "token": 1, "head": 2, "dim": 3}
    permutation = [order[name] for name in layout.split("-")]
    inverse = [permutation.index(axis) for axis in range(4)]
    return cache.permute(permutation).contiguous().permute(inverse)


def tables_of(case: Case, cache: Cache) -> tuple[Tensor, Tensor | None]:
    """The block tables of a case's sequences, and their rows within them; rows of no sequence name no block."""
    if case["tables"] == "own":
        return cache.tables, None
    rows = torch.randperm(2 * len(cache.tables))[: len(cache.tables)].to(cache.tables.device)
    return cache.tables.new_full((2 * len(rows), cache.tables.shape[1]), -1).index_copy_(0, rows, cache.tables), rows


def fused_rows(case: Case, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as views into one projection's output, as the engine has them."""
    kv_heads = num_kv_heads(case)
    heads = kv_heads * case["group_size"]
    rows = torch.randn(num_tokens, heads + 2 * kv_heads, case["head_dim"]).to(DTYPES[case["dtype"]]).to(device)
    query, key, value = rows.split((heads, kv_heads, kv_heads), dim=1)
    return query, key, value


def attention_options(case: Case, device: torch.device) -> dict[str, Any]:
    """Scale, window, soft cap, sinks and slopes, as both kinds of attention take them."""
    heads = num_kv_heads(case) * case["group_size"]
    sinks = torch.randn(heads, device=device) if case["sinks"] else None
    slopes = torch.rand(heads, device=device) / 8 if case["slopes"] else None
    of_slopes = {"slopes": slopes, "rounds_slopes": case["slopes"] == "rounded"}
    scale = case["head_dim"] ** -0.5
    return {"scale": scale, "window": case["window"], "soft_cap": case["soft_cap"], "sinks": sinks, **of_slopes}


# -- one check per kernel -----------------------------------------------------------------------------------------


def decode_lengths(case: Case) -> list[int]:
    block = case["block_size"]
    return {
        "1": [1],
        "5": [5, 5],
        "123": [123],
        "border": [block - 1, block, block + 1],
        "mixed": [1, 123, 0, 5, 2 * block],
        "long": [700, 3],
    }[case["lengths"]]


def check_paged_decode(case: Case, device: torch.device) -> None:
    lengths = decode_lengths(case)
    counts = [1] * len(lengths)
    if case["rows"] == "mixed":
        counts = [min(length, (3, 1, 16, 2, 5)[index]) for index, length in enumerate(lengths)]
    cache = make_cache(case, lengths, device)
    query, _, _ = fused_rows(case, sum(counts), device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    options = attention_options(case, device)
    if case["rows"] == "mixed":
        options["max_query_len"] = max(counts)
        options["cu_query_lens"] = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    plan = None
    if case["split_tokens"] is not None:
        plan = kernels.plan_decode(
            seq_lens,
            num_kv_heads=num_kv_heads(case),
            split_tokens=case["split_tokens"],
            max_seq_len=max(lengths),
            window=case["window"],
            **{name: options[name] for name in ("cu_query_lens", "max_query_len") if name in options},
        )
    tables, options["table_rows"] = tables_of(case, cache)
    arguments = (query, cache.key, cache.value, tables, seq_lens)
    actual_lse, expected_lse = (torch.full(query.shape[:2], math.nan, device=device) for _ in range(2))
    actual = kernels.paged_decode_attention(*arguments, **options, lse=actual_lse, plan=plan)
    expected = kernels.paged_decode_attention_reference(*arguments, **options, lse=expected_lse)
    assert_close(actual, expected, case)
    assert_close(actual_lse, expected_lse, case)


def prefill_chunks(case: Case) -> list[tuple[int, int]]:
    """(tokens already cached, new tokens) of each sequence."""
    block = case["block_size"]
    return {
        "empty": [(5, 0)],
        "1": [(0, 1)],
        "5": [(0, 5), (0, 5)],
        "123": [(0, 123)],
        "border": [(block, block), (block - 1, 1), (0, block + 1)],
        "prefix": [(123, 5), (64, 77)],
        "mixed": [(0, 1), (5, 70), (7, 0), (150, 1), (0, 33)],
    }[case["chunks"]]


def check_paged_prefill(case: Case, device: torch.device) -> None:
    chunks = prefill_chunks(case)
    new = torch.tensor([count for _, count in chunks])
    lengths = [cached + count for cached, count in chunks]
    cache = make_cache(case, lengths, device)
    query, _, _ = fused_rows(case, int(new.sum()), device)
    options = attention_options(case, device)
    tables, options["table_rows"] = tables_of(case, cache)
    arguments = (
        query,
        cache.key,
        cache.value,
        tables,
        torch.nn.functional.pad(new.cumsum(0), (1, 0)).int().to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    actual = kernels.paged_prefill_attention(*arguments, **options)
    assert_close(actual, kernels.paged_prefill_attention_reference(*arguments, **options), case)


def make_float8_cache(cache: Cache) -> tuple[Cache, dict[str, Tensor]]:
    """A cache of float8 with about the same content, its values transposed within their pages, and its scales.

    What a kernel must not read is NaN there, too: bytes of blocks, and the scales of blocks without tokens.
    """
    scales = {}
    quantised = []
    for name, tensor in (("key_scales", cache.key), ("value_scales", cache.value)):
        largest = tensor.float().abs().nan_to_num(0.0).amax(dim=(1, 3))
        scale = torch.exp2(torch.ceil(torch.log2(largest / 448.0)))
        scales[name] = scale.masked_fill(largest == 0.0, torch.nan).contiguous()
        quantised.append((tensor.float() / scale[:, None, :, None]).to(torch.float8_e4m3fn))
    key, value = quantised
    value = value.view(torch.uint8).transpose(1, 3).contiguous().transpose(1, 3).view(value.dtype)
    return Cache(key.contiguous(), value, cache.tables), scales


def check_float8_attention(case: Case, device: torch.device) -> None:
    """Attention over a cache of float8, decode's or prefill's, against its reference, which computes in float32."""
    case = {"layout": LAYOUTS[0], **case}
    if case["operator"] == "prefill":
        chunks = [(0, 5), (60, 90), (70, 1)]
    else:
        rows = 1 if case["operator"] == "decode" else 3
        chunks = [(200 - rows, rows), (64, 1), (5 - rows, rows), (0, 0)]
    lengths = [cached + count for cached, count in chunks]
    cache, scales = make_float8_cache(make_cache(case, lengths, device))
    starts = torch.tensor([0, *accumulate(count for _, count in chunks)], dtype=torch.int32, device=device)
    query, _, _ = fused_rows(case, int(starts[-1]), device)
    arguments = (query, cache.key, cache.value, cache.tables)
    options = {**attention_options(case, device), **scales}
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    if case["operator"] == "prefill":
        actual = kernels.paged_prefill_attention(*arguments, starts, seq_lens, **options)
        expected = kernels.paged_prefill_attention_reference(*arguments, starts, seq_lens, **options)
    else:
        options.update(cu_query_lens=starts, max_query_len=3)
        actual = kernels.paged_decode_attention(*arguments, seq_lens, **options)
        expected = kernels.paged_decode_attention_reference(*arguments, seq_lens, **options)
    tolerance = max(TOLERANCES["float16"], TOLERANCES[case["dtype"]])
    torch.testing.assert_close(actual, expected, rtol=2 * tolerance, atol=tolerance)


def check_rope_and_cache(case: Case, device: torch.device) -> None:
    num_tokens, head_dim = case["tokens"], case["head_dim"]
    cache = make_cache(case, [2 * num_tokens], device)
    query, key, value = fused_rows(case, num_tokens, device)
    index_dtype = torch.int32 if case["index"] == "int32" else torch.int64
    rotary_dim = head_dim if case["rotary"] == "full" else head_dim // 2
    angles = torch.rand(200, rotary_dim // 2) * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    cos_sin = cos_sin.to(torch.float32 if case["angles"] == "float32" else DTYPES[case["dtype"]]).to(device)
    positions = torch.randint(0, 200, (num_tokens,), dtype=index_dtype, device=device)
    num_slots = cache.key.shape[0] * cache.key.shape[1]
    slots = torch.randperm(num_slots)[:num_tokens].to(index_dtype).to(device)
    slots[num_tokens // 2] = -1
    key_before, value_before = key.clone(), value.clone()
    expected = (query.clone(), cache.key.clone(), cache.value.clone())
    options = {"norm": head_norm(case, query), "interleaved": case["interleaved"]}
    kernels.rope_and_cache_reference(expected[0], key, value, cos_sin, positions, *expected[1:], slots, **options)
    kernels.rope_and_cache(query, key, value, cos_sin, positions, cache.key, cache.value, slots, **options)
    for actual, wanted in zip((query, cache.key, cache.value), expected, strict=True):
        assert_close(actual, wanted, case)
    assert torch.equal(key, key_before)
    assert torch.equal(value, value_before)


def head_norm(case: Case, query: Tensor) -> kernels.HeadNorm | None:
    if not case["norm"]:
        return None
    weights = torch.randn(2, query.shape[2]).to(query)
    return kernels.HeadNorm(weights[0], weights[1], EPS)


def check_rope_and_quantise(case: Case, device: torch.device) -> None:
    """Several steps into pages that begin as NaN: growing scales, fresh blocks, a block's rest, and a padded token."""
    size, head_dim = case["block_size"], case["head_dim"]
    shape = (4, size, num_kv_heads(case), head_dim)
    bytes_of_nan = torch.full(shape, 0x7F, dtype=torch.uint8, device=device)
    key_cache = bytes_of_nan.clone().view(torch.float8_e4m3fn)
    value_cache = bytes_of_nan.transpose(1, 3).contiguous().transpose(1, 3).view(torch.float8_e4m3fn)
    scales = [torch.full((4, shape[2]), torch.nan, device=device) for _ in range(2)]
    caches = [key_cache, value_cache, *scales]
    expected = [tensor.view(torch.uint8).clone().view(tensor.dtype) for tensor in caches]
    rotary_dim = head_dim if case["rotary"] == "full" else head_dim // 2
    angles = torch.rand(300, rotary_dim // 2) * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    first = [size + token for token in range(5)]
    fresh = list(range(2 * size, 2 * size + 20))
    for slots, factor in (first, 1.0), ([size + 5, 3 * size], 9.0), ([*fresh, -1, 0, 1], 1.0), ([size + 6, 2], 0.01):
        query, key, value = (rows * factor for rows in fused_rows(case, len(slots), device))
        positions = torch.randint(0, 300, (len(slots),), device=device)
        slot_mapping = torch.tensor(slots, device=device)
        options = {"norm": head_norm(case, query), "interleaved": case["interleaved"]}
        turned = query.clone()
        kernels.rope_and_quantise_reference(turned, key, value, cos_sin, positions, *expected, slot_mapping, **options)
        kernels.rope_and_quantise(query, key, value, cos_sin, positions, *caches, slot_mapping, **options)
        assert_close(query, turned, case)
    for actual, wanted in zip(scales, expected[2:], strict=True):
        assert torch.equal(actual.nan_to_num(), wanted.nan_to_num())
    # A key that lies between two float8 may become either, and a rounding of bfloat16 before is coarser still.
    spacing = 0.14 + TOLERANCES[case["dtype"]]
    torch.testing.assert_close(
        key_cache.float(),
        expected[0].float(),
        rtol=spacing,
        atol=0.002 + 50 * TOLERANCES[case["dtype"]],
        equal_nan=True,
    )
    assert not value_cache[:3].isnan().any()


def check_copy_blocks(case: Case, device: torch.device) -> None:
    dtype = DTYPES.get(case["dtype"], torch.uint8)
    layers = torch.randint(0, 100, (4, 9, case["page"] + 16), device=device).to(dtype)
    source = layers[..., : case["page"]]
    target = source if case["pools"] == 1 else torch.zeros_like(layers)[:, :6, : case["page"]]
    pairs = torch.tensor([[8, 0], [2, 5], [8, 3]], device=device)
    pairs = pairs.int() if case["index"] == "int32" else pairs
    copy = layers.clone()
    expected = copy[..., : case["page"]] if case["pools"] == 1 else target.clone()
    kernels.copy_blocks_reference(expected, copy[..., : case["page"]], pairs)
    kernels.copy_blocks(target, source, pairs)
    assert torch.equal(target, expected)
    assert torch.equal(target[:, 3], source[:, 8])


def strided_rows(shape: Sequence[int], case: Case, device: torch.device) -> Tensor:
    """Rows of a wider tensor when the case asks for strides."""
    extra = 48 if case["strided"] else 0
    rows = torch.randn(*shape[:-1], shape[-1] + extra).to(DTYPES[case["dtype"]]).to(device)
    return rows[..., extra:]


def check_rms_norm(case: Case, device: torch.device) -> None:
    shape = case["shape"]
    x = strided_rows(shape, case, device)
    weight = torch.randn(shape[-1]).to(x.dtype).to(device)
    if not case["residual"]:
        expected = kernels.rms_norm_reference(x, weight, eps=EPS)
        assert_close(kernels.rms_norm(x, weight, eps=EPS), expected, case)
        return
    residual = strided_rows(shape, case, device)
    before = residual.clone()
    normed, summed = kernels.rms_norm(x, weight, eps=EPS, residual=residual)
    expected_normed, expected_sum = kernels.rms_norm_reference(x, weight, eps=EPS, residual=residual)
    assert_close(normed, expected_normed, case)
    assert_close(summed, expected_sum, case)
    assert torch.equal(residual, before)


def check_silu_and_mul(case: Case, device: torch.device) -> None:
    *rows, width = case["shape"]
    gate_up = strided_rows((*rows, 2 * width), case, device)
    assert_close(kernels.silu_and_mul(gate_up), kernels.silu_and_mul_reference(gate_up), case)


def check_filter_and_draw(case: Case, device: torch.device) -> None:
    """The same tokens as the reference; sums of logit and noise within an ulp or two."""
    logits, columns = sampling_rows(case)
    given = {name: None if column is None else column.to(device) for name, column in columns.items()}
    before = logits.to(device)
    token_ids, values = kernels.filter_and_draw(before, **given)
    assert torch.equal(before.cpu(), logits)
    expected_ids, expected = kernels.filter_and_draw_reference(logits, **columns)
    assert token_ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(values.cpu(), expected, rtol=3e-7, atol=3e-6, equal_nan=True)


def sampling_rows(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and the columns of their rows; rows that a filter leaves alone are among them."""
    num_rows, vocab_size = case["shape"]
    wide = torch.randn(num_rows, vocab_size + 16 * case["strided"]) * 3
    logits = wide[:, 16 * case["strided"] :]
    if case["values"] == "tied":
        logits.round_()
    elif case["values"] == "equal":
        logits.fill_(-1.5)
    elif case["values"] == "infinite":
        logits.masked_fill_(torch.rand(logits.shape) < 0.7, -torch.inf)
        logits[:, vocab_size // 2] = 0.0
    top_k = torch.randint(1, vocab_size + 1, (num_rows,)).minimum(
        torch.tensor([vocab_size, 3, 7, vocab_size, 50])[:num_rows]
    )
    top_p = torch.tensor([0.9, 1.0, 0.3, 0.999, 1e-6])[:num_rows]
    min_p = torch.tensor([0.05, 0.2, 0.0, 1e-4, 1.0])[:num_rows]
    columns = {
        "temperatures": torch.rand(num_rows) + 0.4,
        "seeds": torch.randint(-(1 << 62), 1 << 62, (num_rows,)),
        "positions": torch.randint(0, 5000, (num_rows,)),
        "top_k": top_k if case["top_k"] else None,
        "top_p": top_p if case["top_p"] else None,
        "min_p": min_p if case["min_p"] else None,
    }
    return logits, columns


def check_fixed_order_matmul(case: Case, device: torch.device) -> None:
    """The result of the reference, in rows of a wider tensor too."""
    rows, outputs, inputs = case["shape"]
    dtype, extra = DTYPES[case["dtype"]], 48 if case["strided"] else 0
    x = torch.randn(rows, inputs + extra).to(dtype).to(device)[:, extra:]
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype).to(device)
    bias = torch.randn(outputs).to(dtype).to(device) if case["bias"] else None
    expected = kernels.fixed_order_matmul_reference(x, weight, bias)
    tolerance = TOLERANCES[case["dtype"]]
    torch.testing.assert_close(kernels.fixed_order_matmul(x, weight, bias), expected, rtol=tolerance, atol=tolerance)


def check_int8_matmul(case: Case, device: torch.device) -> None:
    """The result of the reference, and of each row alone the same bits."""
    rows, outputs, inputs = case["shape"]
    dtype, group_size = DTYPES[case["dtype"]], case["group"] or inputs
    x = torch.randn(rows, inputs).to(dtype).to(device)
    values = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8).to(device)
    scales = (torch.rand(-(-inputs // group_size), outputs) / inputs**0.5 / 64).to(device)
    bias = torch.randn(outputs).to(dtype).to(device) if case["bias"] else None
    got = kernels.int8_matmul(x, values, scales, group_size, bias)
    tolerance = TOLERANCES[case["dtype"]]
    expected = kernels.int8_matmul_reference(x, values, scales, group_size, bias)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for row in range(0, rows, 23):
        assert torch.equal(kernels.int8_matmul(x[row][None], values, scales, group_size, bias)[0], got[row])


LORA_RANKS: dict[str, Sequence[Sequence[int | None]]] = {
    "8": [(8, 8, 8), (8, 8, 8)],
    "mixed": [(8, 16, 3), (64, None, 100), (None, 1, 17)],
    "256": [(256, 8, 16), (16, 16, 8)],
}
LORA_ROWS = {"1": [1], "mixed": [0, -1, 1, 1, *[0] * 17]}


def lora_matrices(case: Case, device: torch.device) -> list[list[kernels.LoraMatrices | None]]:
    inputs, outputs = case["shape"]
    dtype = DTYPES[case["dtype"]]
    return [
        [
            None
            if rank is None
            else kernels.LoraMatrices(
                (torch.randn(rank, inputs) / inputs**0.5).to(dtype).to(device),
                (torch.randn(rank, count) / rank**0.5).to(dtype).to(device),
                0.37 * (part + 1),
            )
            for part, (rank, count) in enumerate(zip(ranks, outputs, strict=False))
        ]
        for ranks in LORA_RANKS[case["ranks"]]
    ]


def lora_places(case: Case) -> list[tuple[int, int]]:
    outputs = case["shape"][1]
    return [(sum(outputs[:part]), count) for part, count in enumerate(outputs)]


def check_add_lora(case: Case, device: torch.device) -> None:
    """The result of the reference; of each row alone the same bits; rows without an adapter as they were."""
    inputs, outputs = case["shape"]
    dtype, matrices, slots = DTYPES[case["dtype"]], lora_matrices(case, device), torch.tensor(LORA_ROWS[case["rows"]])
    table = kernels.LoraTable(lora_places(case), inputs, len(matrices), dtype, device)
    for slot, each in enumerate(matrices):
        table.put(slot, each)
    x = torch.randn(len(slots), inputs).to(dtype).to(device)
    y = torch.randn(len(slots), sum(outputs)).to(dtype).to(device)

    def added(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        order = slots[list(chosen)].argsort(stable=True)
        grouped = slots[list(chosen)][order]
        found, counts = grouped[grouped >= 0].unique_consecutive(return_counts=True)
        bounds = [0, *counts.cumsum(0).tolist()]
        tiles = kernels.cut_tiles(
            order[grouped >= 0].to(device), bounds, found.tolist(), table.max_rank(found.tolist())
        )
        given = (y[list(chosen)].clone(), x[list(chosen)], table, tiles)
        expected = kernels.add_lora_reference(given[0].clone(), *given[1:])
        return kernels.add_lora(*given), expected

    got, expected = added(range(len(slots)))
    tolerance = TOLERANCES[case["dtype"]]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(got[slots < 0], y[slots < 0])
    for row in (0, len(slots) - 1):
        if slots[row] >= 0:
            assert torch.equal(added([row])[0][0], got[row]), row


class Piece(NamedTuple):
    """What a program reduces at a time, of a sequence."""

    seq: int
    tiles: range  # units, counted from the sequence's start
    slot: int | None  # of the scratch; None where the piece is the whole sequence


def check_plan_decode(case: Case, device: torch.device) -> None:
    """A plan against a plain model of it: what each program does with it, piece by piece.

    A case has `lengths`, a name of PLAN_LENGTHS or numbers, and the options of `plan_decode`; with `rows` each sequence
    has so many query rows, or as many as its length where that is less.
    """
    lengths = PLAN_LENGTHS[case["lengths"]] if isinstance(case["lengths"], str) else case["lengths"]
    rows, window, split_tokens = case["rows"], case["window"], case["split_tokens"]
    counts = [1 if rows is None else min(rows, length) for length in lengths]
    starts = [0, *accumulate(counts)]
    options = {
        "num_kv_heads": case["num_kv_heads"],
        "programs_per_processor": case.get("programs", 2),
        "split_tokens": split_tokens,
        "max_seq_len": max(lengths),
        "window": window,
    }
    if rows is not None:
        options["cu_query_lens"] = torch.tensor(starts, dtype=torch.int32, device=device)
        options["max_query_len"] = rows
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = kernels.plan_decode(seq_lens, **options)
    reference = kernels.plan_decode_reference(seq_lens, **options)
    for name in ("unit_starts", "program_seqs", "query_starts"):
        assert torch.equal(getattr(plan, name), getattr(reference, name)), name
    assert plan.query_starts.tolist() == starts

    expected = []
    firsts = [0 if window is None else max(0, n - rows_ + 1 - window) for n, rows_ in zip(lengths, counts, strict=True)]
    for seq, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        begin, end = first // plan.unit_tokens, -(-length // plan.unit_tokens)
        expected += [(seq, tile) for tile in range(begin, max(end, begin + 1))]
    programs = list(walk(plan, [first // plan.unit_tokens for first in firsts]))
    assert [(piece.seq, tile) for pieces in programs for piece in pieces for tile in piece.tiles] == expected
    shares = [sum(len(piece.tiles) for piece in pieces) for pieces in programs]
    busy = [share for share in shares if share]
    assert max(busy) - min(busy) <= 1
    assert 2 * min(busy) >= min(plan.min_share, len(expected))
    slots = [piece.slot for pieces in programs for piece in pieces if piece.slot is not None]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < plan.num_slots for slot in slots)


def walk(plan: kernels.DecodePlan, skipped: Sequence[int]) -> Iterator[list[Piece]]:
    """Follow each program through its share, as decode attention does; `skipped` units of each sequence are before its
    window."""
    starts, seqs = plan.unit_starts.tolist(), plan.program_seqs.tolist()
    total = starts[-1]
    num_shares = min(plan.num_programs, -(-total // plan.min_share))
    for program, first_seq in enumerate(seqs):
        seq = first_seq
        unit, end = (min(total, index * total // num_shares) for index in (program, program + 1))
        pieces = []
        while unit < end:
            piece_end = unit + 1 if plan.is_fixed else min(starts[seq + 1], end)
            slot = unit if plan.is_fixed else 2 * program + (unit == starts[seq])
            is_whole = unit == starts[seq] and piece_end == starts[seq + 1]
            first = skipped[seq] - starts[seq]
            pieces.append(Piece(seq, range(unit + first, piece_end + first), None if is_whole else slot))
            unit = piece_end
            seq += unit == starts[seq + 1]
        yield pieces


def check_decode_invariance(case: Case, device: torch.device) -> None:
    """With fixed splits a row has the same bits in any batch, in any order, and beside any rows of its sequence."""
    case = {"head_dim": 64, "group_size": 2, "block_size": 16, "layout": LAYOUTS[0], "window": None, **case}
    lengths, counts = [130, 17, 90, 65], [5, 1, 3, 2]
    cache = make_cache(case, lengths, device)
    query, _, _ = fused_rows(case, sum(counts), device)
    sinks = torch.randn(query.shape[1], device=device)
    starts = [0, *accumulate(counts)]

    def attend(rows: Tensor, seqs: list[int], own: list[int], row_counts: list[int]) -> tuple[Tensor, Tensor]:
        given = {
            "cu_query_lens": torch.tensor([0, *accumulate(row_counts)], dtype=torch.int32, device=device),
            "max_query_len": max(row_counts),
        }
        seq_lens = torch.tensor(own, dtype=torch.int32, device=device)
        options = {**given, "window": case["window"]}
        plan = kernels.plan_decode(seq_lens, num_kv_heads=2, split_tokens=64, max_seq_len=130, **options)
        lse = torch.empty(rows.shape[:2], device=device)
        out = kernels.paged_decode_attention(
            rows, cache.key, cache.value, cache.tables[seqs], seq_lens, scale=0.125, sinks=sinks, lse=lse, plan=plan,
            **options,
        )  # fmt: skip
        return out, lse

    together = attend(query, [0, 1, 2, 3], lengths, counts)
    parts = [query[starts[seq] : starts[seq + 1]] for seq in (3, 1, 0, 2)]
    shuffled = attend(torch.cat(parts), [3, 1, 0, 2], [lengths[seq] for seq in (3, 1, 0, 2)], [2, 1, 5, 3])
    begin = 0
    for seq, part in zip((3, 1, 0, 2), parts, strict=True):
        for ours, expected in zip(shuffled, together, strict=True):
            assert torch.equal(ours[begin : begin + len(part)], expected[starts[seq] : starts[seq + 1]])
        begin += len(part)
    for seq, row in ((0, 3), (2, 2)):
        index = starts[seq] + row
        alone = attend(query[index : index + 1], [seq], [lengths[seq] - counts[seq] + row + 1], [1])
        for ours, expected in zip(alone, together, strict=True):
            assert torch.equal(ours[0], expected[index]), f"row {row} of sequence {seq}"


def check_matmul_invariance(case: Case, device: torch.device) -> None:
    """A row has the same bits alone and among any number of others, at any place.

    The sums are near 0: what is left of them is decided by the order of additions.
    """
    num_rows, half = 150, 192
    positive = torch.randn(num_rows, half) * 2.0 ** torch.randint(-6, 7, (num_rows, half))
    own, order = torch.randn(32, half), torch.randperm(half)
    x = torch.cat((positive, -positive[:, order]), dim=1).to(DTYPES[case["dtype"]])
    weight = torch.cat((own, own[:, order]), dim=1).to(DTYPES[case["dtype"]])
    pieces = [part.float() @ own.float().T for part, own in zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)]
    forwards = ((pieces[0] + pieces[1]) + pieces[2]) + pieces[3]
    in_pairs = (pieces[0] + pieces[2]) + (pieces[1] + pieces[3])
    differing = (forwards.to(x.dtype) != in_pairs.to(x.dtype)).float().mean()
    assert differing > 0.5, f"another order of additions changes {differing:.0%} of the sums"
    x, weight = x.to(device), weight.to(device)
    whole = kernels.fixed_order_matmul(x, weight)
    for index in range(0, num_rows, case["step"]):
        alone = kernels.fixed_order_matmul(x[index].clone()[None], weight)
        assert torch.equal(alone[0], whole[index]), f"row {index}"
    for count in (2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129):
        first = (num_rows - count) // 2
        part = kernels.fixed_order_matmul(x[first : first + count], weight)
        assert torch.equal(part, whole[first : first + count]), f"{count} rows from {first}"


CHECKS: Mapping[str, Callable[[Case, torch.device], None]] = {
    "paged_decode": check_paged_decode,
    "plan_decode": check_plan_decode,
    "paged_prefill": check_paged_prefill,
    "rope_and_cache": check_rope_and_cache,
    "rope_and_quantise": check_rope_and_quantise,
    "float8_attention": check_float8_attention,
    "copy_blocks": check_copy_blocks,
    "rms_norm": check_rms_norm,
    "silu_and_mul": check_silu_and_mul,
    "filter_and_draw": check_filter_and_draw,
    "fixed_order_matmul": check_fixed_order_matmul,
    "int8_matmul": check_int8_matmul,
    "add_lora": check_add_lora,
    "decode_invariance": check_decode_invariance,
    "matmul_invariance": check_matmul_invariance,
}
