"""Kernel against reference, one case at a time: run under the interpreter by the unit tests, on a GPU by tests/gpu.

A case is a plain dict (it travels to a worker process as JSON). Whatever a kernel must not read is NaN: the tail of a
sequence's last block and every block that no sequence owns; table entries past the length are -1.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import pagestream_kernels as kernels
import pytest
import torch
from pagestream_engine.attention.kv_store import CacheShape
from pagestream_engine.attention.triton.kv_store import TritonKVStore
from pagestream_engine.sampler.draw import DrawParams, draw
from pagestream_kernels.aot import TARGETS, compile_variant
from pagestream_kernels.launcher import recorded_launches
from pagestream_kernels.silu_and_mul import silu_and_mul_variant
from pagestream_kernels.tables.rows import Row, RowKey
from pagestream_kernels.tuning.timing import Sizes, fastest
from support.kernels.lora import check_add_lora, check_lora_additions
from support.kernels.matmul import (
    check_fixed_order_matmul,
    check_fixed_order_matmul_invariance,
    check_int8_matmul,
    check_quantised_method,
)
from support.kernels.plans import LENGTHS, check_plan_decode
from support.pairwise import Case, product
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
        "lengths": tuple(LENGTHS),
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
        "head_dim": (64, 80, 128),
        "group_size": (1, 3, 8),
        "block_size": (64, 128),
        "dtype": tuple(DTYPES),
        "window": (None, 40),
        "soft_cap": (None, 2.0),
        "sinks": (False, True),
    },
    "copy_blocks": {
        "page": (16, 4096, 10000),
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


# The campaign takes every combination of these; the other factors take a value that the combination's name picks.
PRODUCT_FACTORS: Mapping[str, Sequence[str]] = {
    "paged_decode": ("head_dim", "group_size", "block_size", "dtype", "lengths"),
    "plan_decode": ("lengths", "rows", "split_tokens", "window", "num_kv_heads"),
    "paged_prefill": ("head_dim", "group_size", "block_size", "dtype", "chunks"),
    "rope_and_cache": ("head_dim", "group_size", "block_size", "dtype", "tokens"),
    "rope_and_quantise": ("head_dim", "block_size", "dtype", "rotary", "norm", "interleaved"),
    "float8_attention": ("operator", "head_dim", "group_size", "block_size", "dtype", "window"),
    "copy_blocks": ("page", "dtype", "pools"),
    "rms_norm": ("shape", "dtype", "residual", "strided"),
    "silu_and_mul": ("shape", "dtype", "strided"),
    "filter_and_draw": ("shape", "top_k", "top_p", "min_p", "values"),
    "fixed_order_matmul": ("shape", "dtype", "bias", "strided"),
    "int8_matmul": ("shape", "group", "dtype", "bias"),
    "add_lora": ("shape", "ranks", "rows", "dtype"),
}


def full_product(kernel: str) -> list[Case]:
    """The campaign's cases of one kernel."""
    factors, primary = FACTORS[kernel], PRODUCT_FACTORS[kernel]
    cases = []
    for combination in product({name: factors[name] for name in primary}):
        pick = zlib.crc32(case_id(combination).encode())
        rest = {name: values for name, values in factors.items() if name not in primary}
        for name, values in rest.items():
            pick, index = divmod(pick, len(values))
            combination[name] = values[index]
        cases.append(combination)
    return cases


def case_id(case: Case) -> str:
    """A short name for test reports."""
    return "-".join(f"{name}={value}".replace(" ", "") for name, value in case.items())


def check(kernel: str, case: Case, device: torch.device) -> None:
    """Run one case; AssertionError when kernel and reference differ by more than the dtype's tolerance."""
    torch.manual_seed(zlib.crc32(case_id(case).encode()))
    CHECKS[kernel](case, device)


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
    """Scale, window, soft cap and sinks, as both kinds of attention take them."""
    heads = num_kv_heads(case) * case["group_size"]
    sinks = torch.randn(heads, device=device) if case["sinks"] else None
    scale = case["head_dim"] ** -0.5
    return {"scale": scale, "window": case["window"], "soft_cap": case["soft_cap"], "sinks": sinks}


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
        "mixed": [(0, 1), (5, 123), (7, 0), (300, 1), (0, 33)],
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


def check_infinite_values(case: Case, device: torch.device) -> None:
    """A value that is not finite reaches the rows that see it and no others, whose bits it leaves alone."""
    case = {"head_dim": 64, "group_size": 2, "block_size": 64, "layout": LAYOUTS[0], **case}
    num_tokens, at = 40, 23
    cache = make_cache(case, [num_tokens], device)
    query, _, _ = fused_rows(case, num_tokens, device)
    first = num_tokens - 16 if case["operator"] == "decode" else 0

    def attend() -> Tensor:
        count = num_tokens - first
        lengths = torch.tensor([num_tokens], dtype=torch.int32, device=device)
        starts = torch.tensor([0, count], dtype=torch.int32, device=device)
        options = {"scale": 0.125, "window": case["window"]}
        arguments = (query[first:], cache.key, cache.value, cache.tables)
        if case["operator"] == "decode":
            return kernels.paged_decode_attention(
                *arguments, lengths, **options, cu_query_lens=starts, max_query_len=count
            )
        return kernels.paged_prefill_attention(*arguments, starts, lengths, **options)

    before = attend()
    sees = [token >= at and (case["window"] is None or token < at + case["window"]) for token in range(num_tokens)]
    reached = torch.zeros(before.shape, dtype=torch.bool, device=device)
    reached[torch.tensor(sees[first:], device=device), 2:, 7] = True
    cache.value[cache.tables[0, 0].long(), at, 1, 7] = case["value"]
    after = attend()
    assert torch.equal(after[~reached], before[~reached])
    expected = torch.full_like(after[reached], case["value"])
    assert torch.equal(after[reached].nan_to_num(nan=1.5), expected.nan_to_num(nan=1.5))
    assert reached.any()


def check_prefill_tiles(case: Case, device: torch.device) -> None:
    """Every row of every chunk is in one tile of the list, whose launch has no more than a program a chunk without."""
    chunks = [(int(cached), int(new)) for cached, new in torch.randint(0, 200, (case["num_seqs"], 2))]
    chunks[-1] = (chunks[-1][0], 0)
    starts = torch.tensor([0, *accumulate(new for _, new in chunks)], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([cached + new for cached, new in chunks], dtype=torch.int32, device=device)
    query = torch.zeros(int(starts[-1]), 6, 64, device=device, dtype=torch.float16)
    cache = torch.zeros(1, 64, 2, 64, device=device, dtype=torch.float16)
    plan = kernels.plan_prefill(query, cache, cache, starts, seq_lens)
    listed = [(seq, row) for seq, row in zip(plan.tile_seqs.tolist(), plan.tile_rows.tolist(), strict=True) if seq >= 0]
    wanted = {(seq, row) for seq, (_, new) in enumerate(chunks) for row in range(0, 3 * new, plan.rows_per_tile)}
    assert set(listed) == wanted
    assert len(listed) == len(wanted)
    assert len(plan.tile_seqs) - len(listed) <= len(chunks)
    ends = [seq_lens[seq] - max(0, chunks[seq][1] - (row + plan.rows_per_tile) // 3) for seq, row in listed]
    assert ends == sorted(ends, reverse=True)


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
    fresh = list(range(2 * size, 3 * size))
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


def check_store_copies(case: Case, device: torch.device) -> None:
    """The engine's store copies blocks by one launch; where a source is a target, too, it reads all of them before."""
    store = TritonKVStore([CacheShape((0, 1), 2, 8, 16, torch.float16)], device)
    store.allocate(5)
    store.cache.copy_(torch.randn(store.cache.shape))
    for copies, num_launches in (([(0, 3), (1, 4)], 1), ([(3, 1), (1, 2)], 0)):
        before = store.cache.clone()
        with recorded_launches() as keys:
            store.copy_blocks(copies)
        assert [name for name, _, _ in keys] == ["_copy_blocks_kernel"] * num_launches
        for source, target in copies:
            assert torch.equal(store.cache[:, :, target], before[:, :, source])


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
    """The same tokens as the reference, and as the engine's CPU path; sums of logit and noise within an ulp or two."""
    logits, columns = sampling_rows(case)
    given = {name: None if column is None else column.to(device) for name, column in columns.items()}
    before = logits.to(device)
    token_ids, values = kernels.filter_and_draw(before, **given)
    assert torch.equal(before.cpu(), logits)
    expected_ids, expected = kernels.filter_and_draw_reference(logits, **columns)
    assert token_ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(values.cpu(), expected, rtol=3e-7, atol=3e-6, equal_nan=True)
    positions = columns.pop("positions")
    drawn = draw(logits.clone(), DrawParams(**columns), positions)
    assert token_ids.tolist() == drawn.token_ids.tolist()


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


# -- single questions to a process that interprets ------------------------------------------------------------------


def check_decode_invariance(case: Case, device: torch.device) -> None:
    """With fixed splits a row has the same bits in any batch, in any order, and beside any rows of its sequence."""
    case = {"head_dim": 64, "group_size": 4, "block_size": 16, "layout": LAYOUTS[0], "window": None, **case}
    lengths, counts = [200, 17, 90, 129], [5, 1, 6, 2]
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
        plan = kernels.plan_decode(seq_lens, num_kv_heads=2, split_tokens=64, max_seq_len=200, **options)
        lse = torch.empty(rows.shape[:2], device=device)
        out = kernels.paged_decode_attention(
            rows, cache.key, cache.value, cache.tables[seqs], seq_lens, scale=0.125, sinks=sinks, lse=lse, plan=plan,
            **options,
        )  # fmt: skip
        return out, lse

    together = attend(query, [0, 1, 2, 3], lengths, counts)
    parts = [query[starts[seq] : starts[seq + 1]] for seq in (3, 1, 0, 2)]
    shuffled = attend(torch.cat(parts), [3, 1, 0, 2], [lengths[seq] for seq in (3, 1, 0, 2)], [2, 1, 5, 6])
    begin = 0
    for seq, part in zip((3, 1, 0, 2), parts, strict=True):
        for ours, expected in zip(shuffled, together, strict=True):
            assert torch.equal(ours[begin : begin + len(part)], expected[starts[seq] : starts[seq + 1]])
        begin += len(part)
    for seq, row in ((0, 0), (0, 3), (1, 0), (2, 5), (3, 0)):
        index = starts[seq] + row
        alone = attend(query[index : index + 1], [seq], [lengths[seq] - counts[seq] + row + 1], [1])
        for ours, expected in zip(alone, together, strict=True):
            assert torch.equal(ours[0], expected[index]), f"row {row} of sequence {seq}"


def check_prefill_invariance(case: Case, device: torch.device) -> None:
    """A token's bits do not depend on where its prompt is cut into chunks, nor on the chunks beside it."""
    case = {"head_dim": 64, "group_size": 4, "layout": LAYOUTS[0], **case}
    cache = make_cache(case, [150, 70], device)
    query, _, _ = fused_rows(case, 220, device)
    sinks = torch.randn(query.shape[1], device=device)

    def attend(chunks: list[tuple[int, int, int]]) -> Tensor:
        """Attend with chunks (sequence, first token, end)."""
        counts = [end - begin for _, begin, end in chunks]
        return kernels.paged_prefill_attention(
            torch.cat([query[150 * seq + begin : 150 * seq + end] for seq, begin, end in chunks]),
            cache.key,
            cache.value,
            cache.tables[[seq for seq, _, _ in chunks]],
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
            torch.tensor([end for _, _, end in chunks], dtype=torch.int32, device=device),
            scale=0.125,
            window=case["window"],
            sinks=sinks,
        )

    whole = attend([(0, 0, 150)])
    parts = attend([(0, 0, 37)]), attend([(1, 3, 70), (0, 37, 101)])[67:], attend([(0, 101, 150)])
    assert torch.equal(torch.cat(parts), whole)


def check_decode_shares(case: Case, device: torch.device) -> None:
    """Every sequence, KV head and tile is read exactly once: with equal scores a result counts its tokens by tile."""
    tile, most = 64, 16
    lengths = [int(length) for length in torch.randint(0, tile * most + 1, (case["num_seqs"],))]
    blocks = torch.arange(len(lengths) * most, dtype=torch.int32, device=device).view(len(lengths), most)
    keys = torch.zeros(blocks.numel(), tile, 3, most, device=device)
    values = torch.eye(most, device=device).repeat(len(lengths), 1)[:, None, None].expand(keys.shape)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = None
    if case["split_tokens"] is not None:
        plan = kernels.plan_decode(seq_lens, num_kv_heads=3, split_tokens=case["split_tokens"], max_seq_len=tile * most)
    query = torch.randn(len(lengths), 3, most, device=device)
    out = kernels.paged_decode_attention(query, keys, values, blocks, seq_lens, scale=1.0, plan=plan)
    read = (seq_lens[:, None] - torch.arange(most, device=device) * tile).clamp(0, tile)
    expected = (read / seq_lens[:, None].clamp(min=1))[:, None].expand(-1, 3, -1)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def check_decode_wrong_plan(case: Case, device: torch.device) -> None:
    case = {"head_dim": 64, "group_size": 1, "block_size": 16, "layout": LAYOUTS[0], **case}
    cache = make_cache(case, [5, 5], device)
    query, _, _ = fused_rows(case, 2, device)
    seq_lens = torch.tensor([5, 5], dtype=torch.int32, device=device)
    plan = kernels.plan_decode(seq_lens[:1], num_kv_heads=2)
    with pytest.raises(kernels.KernelArgumentError, match=r"plan\.unit_starts"):
        kernels.paged_decode_attention(query, cache.key, cache.value, cache.tables, seq_lens, scale=1.0, plan=plan)


def check_filter_and_draw_nothing(case: Case, device: torch.device) -> None:
    """A row that has a NaN or nothing to choose from says so, and leaves its neighbours alone."""
    options = {"shape": (4, 300), "strided": False, "values": "normal", "top_k": True, "top_p": True, "min_p": True}
    logits, columns = sampling_rows(options)
    logits[0, 7] = torch.nan
    logits[2] = -torch.inf
    given = {name: column.to(device) for name, column in columns.items()}
    token_ids, values = kernels.filter_and_draw(logits.to(device), **given)
    assert values.isnan().tolist() == [True, False, False, False]
    assert (values == -torch.inf).tolist() == [False, False, True, False]
    assert all(0 <= token_id < 300 for token_id in token_ids.tolist())
    expected, _ = kernels.filter_and_draw_reference(logits, **columns)
    assert token_ids[1::2].tolist() == expected[1::2].tolist()


def check_filter_and_draw_tokens(case: Case, device: torch.device) -> None:
    """Many draws from a few rows, against the engine's CPU path."""
    num_rows, vocab_size = case["rows"], 40
    logits = (torch.randn(4, vocab_size) * 2).repeat(num_rows // 4, 1)
    params = DrawParams(
        temperatures=torch.full((num_rows,), 0.8),
        seeds=torch.arange(num_rows) * 977,
        top_k=torch.tensor([20, 40]).repeat(num_rows // 2),
        top_p=torch.tensor([0.9, 0.6, 1.0, 0.99]).repeat(num_rows // 4),
        min_p=None,
    )
    positions = torch.arange(num_rows) % 50
    columns = {name: getattr(params, name).to(device) for name in ("temperatures", "seeds", "top_k", "top_p")}
    token_ids, _ = kernels.filter_and_draw(logits.to(device), positions=positions.to(device), **columns)
    assert token_ids.tolist() == draw(logits, params, positions).token_ids.tolist()
    assert len(token_ids.unique()) > 15


def check_fastest_row(case: Case, device: torch.device) -> None:
    """The times of an operator's candidates are of launches that are cut as they say; the least time wins."""
    key = RowKey(case["operator"], "float16", 64, 16, 16)
    candidates = [Row(16, tokens, 4, 1) for tokens in (16, 32, 64)]
    times, cuts = iter((3.0, 1.0, 2.0)), []

    def measure(run: Callable[[], object]) -> float:
        with recorded_launches() as keys:
            run()
        cuts.extend({dict(constants)["BLOCK_KV"] for _, constants, _ in keys if "BLOCK_KV" in dict(constants)})
        return next(times)

    assert fastest(key, candidates, device, measure, Sizes(1, 20, 20)) == candidates[1]
    assert cuts == [16, 32, 64]


def check_refuses_to_compile(case: Case, device: torch.device) -> None:
    variant = silu_and_mul_variant(width=64, dtype=DTYPES[case["dtype"]])
    with pytest.raises(kernels.KernelUnavailableError, match="TRITON_INTERPRET"):
        compile_variant(variant, TARGETS["sm_90"])


def check_benchmark(case: Case, device: torch.device) -> None:
    """Run the benchmarks' smallest workloads: no other test would notice that they are broken."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
    sys.path.insert(0, str(folder))
    workloads = list(import_module(f"bench_{case['kernel']}").workloads(device, smoke=True))
    assert workloads
    for workload in workloads:
        assert workload.num_bytes > 0
        workload.run()


def check_backend(case: Case, device: torch.device) -> None:
    """Run the engine's attention over these kernels: see the module that it calls."""
    import_module("support.engines.attention_cases").check_case(case, device)


def check_wide_offsets(case: Case, device: torch.device) -> None:
    """Run a kernel on tensors with gaps of 2**31 elements: see the module that it calls."""
    import_module("support.kernels.wide").check_wide_offsets(case, device)


CHECKS: Mapping[str, Callable[[Case, torch.device], None]] = {
    "paged_decode": check_paged_decode,
    "plan_decode": check_plan_decode,
    "paged_prefill": check_paged_prefill,
    "rope_and_cache": check_rope_and_cache,
    "rope_and_quantise": check_rope_and_quantise,
    "copy_blocks": check_copy_blocks,
    "store_copies": check_store_copies,
    "rms_norm": check_rms_norm,
    "silu_and_mul": check_silu_and_mul,
    "filter_and_draw": check_filter_and_draw,
    "filter_and_draw_nothing": check_filter_and_draw_nothing,
    "fixed_order_matmul": check_fixed_order_matmul,
    "fixed_order_matmul_invariance": check_fixed_order_matmul_invariance,
    "int8_matmul": check_int8_matmul,
    "quantised_method": check_quantised_method,
    "add_lora": check_add_lora,
    "lora_additions": check_lora_additions,
    "filter_and_draw_tokens": check_filter_and_draw_tokens,
    "decode_invariance": check_decode_invariance,
    "decode_shares": check_decode_shares,
    "float8_attention": check_float8_attention,
    "infinite_values": check_infinite_values,
    "prefill_tiles": check_prefill_tiles,
    "prefill_invariance": check_prefill_invariance,
    "decode_wrong_plan": check_decode_wrong_plan,
    "benchmark": check_benchmark,
    "backend": check_backend,
    "wide_offsets": check_wide_offsets,
    "fastest_row": check_fastest_row,
    "refuses_to_compile": check_refuses_to_compile,
}
