"""Prefill attention over the paged KV cache: packed chunks of new tokens, causal over cached prefix and new tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from pagestream_kernels.checks import check_dtype, check_last_stride, check_output, check_same_device, check_shape
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.paging import (
    MAX_ALIGNMENT,
    WIDE_ALIGNMENT,
    Geometry,
    Options,
    capped_reference,
    check_cache,
    check_options,
    check_tables,
    gather_cache,
    score_factors,
    softmax_reference,
)
from pagestream_kernels.runtime import (
    Backend,
    Variant,
    cdiv,
    current_backend,
    ieee_dot,
    kernel,
    needs_upcast,
    next_power_of_two,
    pointer_to,
    require_launchable,
    soft_capped,
    tl,
)
from pagestream_kernels.tiles import aligned, blocks_of, tile_offsets

MIN_DOT = 16  # tl.dot's smallest side
MAX_ROWS = 128  # of a tile
LOWEST = tl.constexpr(-1e30) if tl is not None else -1e30  # below every score


@kernel(
    "block_tables_ptr",
    "cu_query_lens_ptr",
    "seq_lens_ptr",
    "sinks_ptr",
    "window",
    "table_stride",
    pointers=("out_ptr", "query_ptr"),
    strides=("out_stride_n", "out_stride_h", "query_stride_n", "query_stride_h"),
)
def _prefill_kernel(  # noqa: PLR0912, PLR0915 - one kernel is one function
    out_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    cu_query_lens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    score_factor: float,
    cap_factor: float,
    window: int,
    out_stride_n: tl.tensor,
    out_stride_h: tl.tensor,
    query_stride_n: tl.tensor,
    query_stride_h: tl.tensor,
    key_stride_b: tl.tensor,
    key_stride_t: tl.tensor,
    key_stride_h: tl.tensor,
    key_stride_d: tl.tensor,
    value_stride_b: tl.tensor,
    value_stride_t: tl.tensor,
    value_stride_h: tl.tensor,
    value_stride_d: tl.tensor,
    table_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    tile_start = tl.program_id(0) * BLOCK_ROWS
    kv_head = tl.program_id(1).to(tl.int64)
    seq = tl.program_id(2).to(tl.int64)
    query_start = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - query_start
    # -- a row is one token of one query head: the heads that share a KV head share its loads --
    rows = tile_start + tl.arange(0, BLOCK_ROWS)
    if tile_start < query_len * GROUP:
        seq_len = tl.load(seq_lens_ptr + seq)
        context_len = seq_len - query_len

        first_token = tile_start // GROUP
        first_head = kv_head * GROUP
        tokens = rows // GROUP - first_token
        heads = rows % GROUP
        row_mask = first_token + tokens < query_len
        first_position = context_len + first_token
        row_positions = first_position + tokens
        columns = tl.arange(0, BLOCK_DIM)
        column_mask = columns < HEAD_DIM
        if WIDE:
            tokens = tokens.to(tl.int64)
            heads = heads.to(tl.int64)
            columns = columns.to(tl.int64)
        first_row = (query_start + first_token).to(tl.int64)
        query_mask = row_mask[:, None] & column_mask[None, :]
        query_ptrs = query_ptr + (first_row * query_stride_n + first_head * query_stride_h)
        query_ptrs += (tokens * query_stride_n + heads * query_stride_h)[:, None] + columns[None, :]
        query = tl.load(query_ptrs, mask=query_mask, other=0.0)

        if ALIGNMENT < 16:  # Triton's own specialisation knows of 16 only
            key_stride_b, value_stride_b = aligned(key_stride_b, ALIGNMENT), aligned(value_stride_b, ALIGNMENT)
            key_stride_t, value_stride_t = aligned(key_stride_t, ALIGNMENT), aligned(value_stride_t, ALIGNMENT)
            key_stride_h, value_stride_h = aligned(key_stride_h, ALIGNMENT), aligned(value_stride_h, ALIGNMENT)
        key_head_ptr = key_cache_ptr + kv_head * key_stride_h
        value_head_ptr = value_cache_ptr + kv_head * value_stride_h
        table_ptr = block_tables_ptr + seq * table_stride

        # -- before the first tile: a sink is a score; behind a window a row's first tiles may hide every token from it,
        # and a maximum of -inf would give exp2(-inf + inf) --
        maximum = tl.full((BLOCK_ROWS,), LOWEST if HAS_WINDOW else float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        if HAS_SINKS:
            maximum = tl.load(sinks_ptr + first_head + heads, mask=row_mask, other=0.0) * 1.4426950408889634
            total += 1.0
        accumulator = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
        # Tiles begin at multiples of their size, so that a row's sums do not depend on where its chunk begins.
        seen = 0
        if HAS_WINDOW:
            seen = tl.maximum(first_position + 1 - window, 0)
        begin = seen // BLOCK_KV * BLOCK_KV
        end = tl.minimum(seq_len, context_len + (tile_start + BLOCK_ROWS - 1) // GROUP + 1)
        # A tile's block is read one tile ahead: keys and values are then one load away, and their copies overlap.
        blocks = blocks_of(table_ptr, begin, seen, end, CACHE_BLOCK, BLOCK_KV)
        for tile in range(begin, end, BLOCK_KV):
            next_blocks = blocks_of(table_ptr, tile + BLOCK_KV, seen, end, CACHE_BLOCK, BLOCK_KV)
            positions = tile + tl.arange(0, BLOCK_KV)

            # -- scores; what a page holds behind the end is read and dropped --
            first, places = tile_offsets(blocks, tile, key_stride_b, key_stride_t, CACHE_BLOCK, BLOCK_KV, WIDE)
            key_ptrs = (key_head_ptr + first) + (places[None, :] + columns[:, None] * key_stride_d)
            if HEAD_DIM == BLOCK_DIM:
                keys = tl.load(key_ptrs)
            else:
                keys = tl.load(key_ptrs, mask=column_mask[:, None], other=0.0)
            scores = ieee_dot(query, keys, UPCAST) * score_factor
            if HAS_SOFT_CAP:
                scores = soft_capped(scores, cap_factor)
            if HAS_WINDOW:
                distances = row_positions[:, None] - positions[None, :]
                scores = tl.where((distances >= 0) & (distances < window), scores, float("-inf"))
            elif tile + BLOCK_KV - 1 > first_position:  # tiles before the diagonal are seen by every row
                scores = tl.where(positions[None, :] <= row_positions[:, None], scores, float("-inf"))

            # -- online softmax; without a window position 0 is visible to every row: the maximum is finite --
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            rescale = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(scores - new_maximum[:, None])
            total = total * rescale + tl.sum(weights, axis=1)

            # -- weighted values --
            first, places = tile_offsets(blocks, tile, value_stride_b, value_stride_t, CACHE_BLOCK, BLOCK_KV, WIDE)
            value_ptrs = (value_head_ptr + first) + (places[:, None] + columns[None, :] * value_stride_d)
            value_mask = (positions < end)[:, None]
            if HAS_WINDOW:
                value_mask = value_mask & (positions >= seen)[:, None]
            if HEAD_DIM != BLOCK_DIM:
                value_mask = value_mask & column_mask[None, :]
            values = tl.load(value_ptrs, mask=value_mask, other=0.0)
            accumulator = accumulator * rescale[:, None]
            accumulator += ieee_dot(weights.to(values.dtype), values, UPCAST)
            maximum = new_maximum
            blocks = next_blocks

        result = (accumulator / total[:, None]).to(out_ptr.dtype.element_ty)
        out_ptrs = out_ptr + (first_row * out_stride_n + first_head * out_stride_h)
        out_ptrs += (tokens * out_stride_n + heads * out_stride_h)[:, None] + columns[None, :]
        tl.store(out_ptrs, result, mask=query_mask)


def _tile(geometry: Geometry, block_dim: int, options: Options) -> tuple[int, int, int]:
    """(rows, KV tokens, warps) of a program: the largest that compiles without spills for every target.

    Found by compiling rows 16 to 128, tokens 16 to 64 and 4 or 8 warps; speed on a GPU has not decided it yet. In
    float32 the products run on the plain multipliers, whose operands fill the registers early.
    """
    if geometry.alignment < WIDE_ALIGNMENT:
        return 16, 16, 8
    if geometry.dtype == torch.float32:
        if block_dim == 128 and any(options):
            return 32, 16, 8
        return (32, 32, 4) if block_dim <= 64 else (32, 32, 8) if block_dim == 128 else (16, 16, 8)
    if block_dim <= 64:
        return 64, 64, 4
    rows = 128 if block_dim == 128 else 64
    tokens = 16 if block_dim == 256 and geometry.block_size < 32 else 32
    return (rows if geometry.alignment == MAX_ALIGNMENT else rows // 2), tokens, 8  # whose rows are in narrower pieces


@lru_cache(maxsize=256)
def prefill_variant(geometry: Geometry, backend: Backend, options: Options) -> Variant:
    """How the kernel is built for a cache, a GPU family and the options of a layer."""
    block_dim = max(MIN_DOT, next_power_of_two(geometry.head_dim))
    block_rows, block_kv, num_warps = _tile(geometry, block_dim, options)
    has_wide_loads = geometry.alignment >= WIDE_ALIGNMENT
    pipelined = backend == "cuda" and geometry.dtype != torch.float32 and has_wide_loads
    pointer = pointer_to(geometry.dtype)
    strides = [f"{name}_stride_{axis}" for name in ("out", "query") for axis in "nh"]
    cache_strides = [f"{name}_stride_{axis}" for name in ("key", "value") for axis in "bthd"]
    return Variant(
        kernel=_prefill_kernel,
        signature={
            **dict.fromkeys(("out_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr"), pointer),
            **dict.fromkeys(("block_tables_ptr", "cu_query_lens_ptr", "seq_lens_ptr"), "*i32"),
            "sinks_ptr": "*fp32" if options.sinks else "*i32",
            **dict.fromkeys(("score_factor", "cap_factor"), "fp32"),
            **dict.fromkeys(("window", *strides, *cache_strides, "table_stride"), "i32"),
        },
        constants={
            "HEAD_DIM": geometry.head_dim,
            "GROUP": geometry.group_size,
            "CACHE_BLOCK": geometry.block_size,
            "BLOCK_DIM": block_dim,
            "BLOCK_ROWS": block_rows,
            "BLOCK_KV": block_kv,
            "WIDE": geometry.is_wide,
            "ALIGNMENT": geometry.alignment,
            "UPCAST": needs_upcast(geometry.dtype),
            "HAS_WINDOW": options.window,
            "HAS_SOFT_CAP": options.soft_cap,
            "HAS_SINKS": options.sinks,
        },
        num_warps=num_warps,
        num_stages=3 if pipelined else 1,  # 3: the copies of two tiles
        unit_strides=("key_stride_d", "value_stride_d"),
    )


def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of packed chunks of new tokens, each causal over its sequence's cached prefix and the chunk itself.

    Args:
        query: (total_new_tokens, num_heads, head_dim), float32, float16 or bfloat16, last dimension contiguous: the
            chunks one after the other. num_heads is a multiple of num_kv_heads: head h reads KV head
            h // (num_heads // num_kv_heads). head_dim <= 256.
        key_cache, value_cache: (num_blocks, block_size, num_kv_heads, head_dim) of the same dtype with any strides,
            a permuted view too; keys and values of the new tokens are already in it. block_size is 8, 16, 32 or 64.
        block_tables: (num_seqs, max_blocks) int32. Entries within what a chunk sees must be blocks of the cache (not
            checked); the others are never read.
        cu_query_lens: (num_seqs + 1,) int32: 0, then the running sum of the chunks' lengths (not checked).
        seq_lens: (num_seqs,) int32: length with the new tokens, so at least the chunk's (not checked).
        max_query_len: a bound on the chunks' lengths. Tokens beyond it are not computed.
        scale: factor of the scores, usually head_dim ** -0.5.
        window: most tokens that a token sees, itself included; None: all.
        soft_cap: bound c of the scores, which become c * tanh(score / c); None: none.
        sinks: (num_heads,) float32: a score of each head that takes part in the softmax and has no value; None: none.
        out: as query, or None for a new tensor.

    Returns:
        (total_new_tokens, num_heads, head_dim), accumulated in float32.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: PagedAttention, https://arxiv.org/abs/2309.06180; FlashAttention-2, https://arxiv.org/abs/2307.08691.
    """
    geometry, out = _check(
        query, key_cache, value_cache, block_tables, cu_query_lens, seq_lens, max_query_len, scale, out
    )
    options = check_options(window, soft_cap, sinks, query.shape[1])
    check_same_device(("query", query), ("sinks", sinks))
    require_launchable(query.device, reference="paged_prefill_attention_reference")
    farthest = max(MAX_ROWS * rows.stride(0) + geometry.group_size * rows.stride(1) for rows in (query, out))
    geometry = replace(geometry, is_wide=geometry.is_wide or farthest >= 2**31)
    variant = prefill_variant(geometry, current_backend(), options)
    score_factor, cap_factor = score_factors(scale, soft_cap)
    num_rows = max_query_len * geometry.group_size
    variant.launch(
        (cdiv(num_rows, variant.constants["BLOCK_ROWS"]), key_cache.shape[2], seq_lens.shape[0]),
        {
            "out_ptr": out,
            "query_ptr": query,
            "key_cache_ptr": key_cache,
            "value_cache_ptr": value_cache,
            "block_tables_ptr": block_tables,
            "cu_query_lens_ptr": cu_query_lens,
            "seq_lens_ptr": seq_lens,
            "sinks_ptr": seq_lens if sinks is None else sinks,
            "score_factor": score_factor,
            "cap_factor": cap_factor,
            "window": window or 0,
            "out_stride_n": out.stride(0),
            "out_stride_h": out.stride(1),
            "query_stride_n": query.stride(0),
            "query_stride_h": query.stride(1),
            **{f"key_stride_{axis}": stride for axis, stride in zip("bthd", key_cache.stride(), strict=True)},
            **{f"value_stride_{axis}": stride for axis, stride in zip("bthd", value_cache.stride(), strict=True)},
            "table_stride": block_tables.stride(0),
        },
    )
    return out


def paged_prefill_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_prefill_attention` in torch, on any device; same arguments, result and errors. One pass a sequence."""
    geometry, out = _check(
        query, key_cache, value_cache, block_tables, cu_query_lens, seq_lens, max_query_len, scale, out
    )
    check_options(window, soft_cap, sinks, query.shape[1])
    starts = cu_query_lens.tolist()
    for index, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[index], min(starts[index + 1], starts[index] + max_query_len)
        first_position = seq_len - (starts[index + 1] - start)
        begin = 0 if window is None else max(0, first_position + 1 - window)
        table = block_tables[index : index + 1, : cdiv(seq_len, geometry.block_size)]
        keys = gather_cache(key_cache, table)[0, begin:seq_len].float()
        values = gather_cache(value_cache, table)[0, begin:seq_len].float()
        positions = torch.arange(begin, seq_len, device=query.device)
        rows = first_position + torch.arange(end - start, device=query.device)[:, None]
        visible = positions <= rows
        if window is not None:
            visible &= positions > rows - window
        grouped = query[start:end].float().reshape(end - start, keys.shape[1], geometry.group_size, geometry.head_dim)
        scores = capped_reference(torch.einsum("qkgd,tkd->kgqt", grouped, keys) * scale, soft_cap)
        own_sinks = None if sinks is None else sinks.view(keys.shape[1], -1, 1)
        weights = softmax_reference(scores.masked_fill(~visible, -math.inf), own_sinks)
        out[start:end] = torch.einsum("kgqt,tkd->qkgd", weights, values).flatten(1, 2).to(out.dtype)
    return out


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    out: Tensor | None,
) -> tuple[Geometry, Tensor]:
    geometry = check_cache(query, key_cache, value_cache)
    check_shape("seq_lens", seq_lens, (None,), meaning="(num_seqs,)")
    num_seqs = seq_lens.shape[0]
    check_tables(block_tables, seq_lens, num_seqs)
    check_dtype("cu_query_lens", cu_query_lens, (torch.int32,))
    check_shape("cu_query_lens", cu_query_lens, (num_seqs + 1,), meaning="(num_seqs + 1,)")
    check_last_stride("cu_query_lens", cu_query_lens)
    if max_query_len < 0:
        raise KernelArgumentError(f"max_query_len: expected at least 0, got {max_query_len}")
    if not math.isfinite(scale):
        raise KernelArgumentError(f"scale: expected a finite number, got {scale}")
    check_same_device(
        ("query", query),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_tables", block_tables),
        ("cu_query_lens", cu_query_lens),
        ("seq_lens", seq_lens),
        ("out", out),
    )
    return geometry, check_output("out", out, query, query.shape)
