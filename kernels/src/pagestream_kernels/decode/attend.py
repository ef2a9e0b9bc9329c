"""Attention of each program over its share of a step's tiles, and how the kernel is built."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from pagestream_kernels.decode.shares import LOWEST, first_seen, share_begin, shares_of
from pagestream_kernels.decode_plan import TILE_TOKENS
from pagestream_kernels.paging import MAX_ALIGNMENT, WIDE_ALIGNMENT, Geometry, Options
from pagestream_kernels.runtime import (
    Backend,
    Variant,
    ieee_dot,
    kernel,
    needs_upcast,
    next_power_of_two,
    pointer_to,
    soft_capped,
    tl,
)
from pagestream_kernels.tiles import aligned, blocks_of, tile_offsets

MIN_DOT = 16  # tl.dot's smallest side


@kernel(
    "lse_ptr",
    "block_tables_ptr",
    "seq_lens_ptr",
    "query_starts_ptr",
    "unit_starts_ptr",
    "program_seqs_ptr",
    "sinks_ptr",
    "window",
    "num_seqs",
    "max_query_len",
    "table_stride",
    pointers=("out_ptr", "query_ptr"),
    strides=("out_stride_n", "out_stride_h", "query_stride_n", "query_stride_h"),
)
def _attend_kernel(  # noqa: PLR0912, PLR0915 - one kernel is one function
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    unit_starts_ptr: tl.tensor,
    program_seqs_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    score_factor: float,
    cap_factor: float,
    window: int,
    num_seqs: int,
    max_query_len: int,
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
    UNIT_TOKENS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    IS_FIXED: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    num_units = tl.load(unit_starts_ptr + num_seqs)
    num_shares = shares_of(num_units, tl.num_programs(0), MIN_SHARE)
    unit = share_begin(program, num_units, num_shares)
    share_end = share_begin(program + 1, num_units, num_shares)

    # -- a row is one token of one of the query heads that share this KV head --
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = rows // GROUP
    heads = rows % GROUP
    columns = tl.arange(0, BLOCK_DIM)
    first_head = (kv_head * GROUP).to(tl.int64)
    column_mask = columns < HEAD_DIM
    if WIDE:
        tokens = tokens.to(tl.int64)
        heads = heads.to(tl.int64)
        columns = columns.to(tl.int64)
    if ALIGNMENT < 16:  # Triton's own specialisation knows of 16 only
        key_stride_b, value_stride_b = aligned(key_stride_b, ALIGNMENT), aligned(value_stride_b, ALIGNMENT)
        key_stride_t, value_stride_t = aligned(key_stride_t, ALIGNMENT), aligned(value_stride_t, ALIGNMENT)
        key_stride_h, value_stride_h = aligned(key_stride_h, ALIGNMENT), aligned(value_stride_h, ALIGNMENT)
    key_head_ptr = key_cache_ptr + kv_head.to(tl.int64) * key_stride_h
    value_head_ptr = value_cache_ptr + kv_head.to(tl.int64) * value_stride_h
    sinks = tl.full((BLOCK_ROWS,), LOWEST, tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + first_head + heads) * 1.4426950408889634

    seq = tl.load(program_seqs_ptr + program)
    while unit < share_end:
        # -- the next piece: what is left of a sequence, up to the share's end; or one fixed split --
        seq_begin = tl.load(unit_starts_ptr + seq)
        seq_end = tl.load(unit_starts_ptr + seq + 1)
        piece_end = tl.minimum(seq_end, share_end)
        if IS_FIXED:
            piece_end = unit + 1
        seq_len = tl.load(seq_lens_ptr + seq)
        query_start = tl.load(query_starts_ptr + seq)
        query_len = tl.load(query_starts_ptr + seq + 1) - query_start
        seen = first_seen(seq_len, query_len, window, HAS_WINDOW)
        skipped = seen // UNIT_TOKENS - seq_begin
        begin = tl.maximum((unit + skipped) * UNIT_TOKENS, seen // BLOCK_KV * BLOCK_KV)
        end = tl.minimum((piece_end + skipped) * UNIT_TOKENS, seq_len)

        row_mask = tokens < query_len
        row_positions = seq_len - query_len + tokens
        row_columns = row_mask[:, None] & column_mask[None, :]
        query_row = query_start.to(tl.int64)
        query_ptrs = query_ptr + (query_row * query_stride_n + first_head * query_stride_h)
        query_ptrs += (tokens * query_stride_n + heads * query_stride_h)[:, None] + columns[None, :]
        query = tl.load(query_ptrs, mask=row_columns, other=0.0)
        table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride

        maximum = tl.full((BLOCK_ROWS,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        accumulator = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
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
            visible = positions[None, :] <= row_positions[:, None]
            if HAS_WINDOW:
                visible = visible & (positions[None, :] > row_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))

            # -- online softmax; a row that sees nothing of the tile is unchanged, bit for bit --
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

        # -- a piece that is a whole sequence is its result; others are merged --
        result = accumulator / tl.where(total > 0.0, total, 1.0)[:, None]
        lse = maximum + tl.log2(total)
        if (unit == seq_begin) & (piece_end == seq_end):
            if HAS_SINKS:
                new_maximum = tl.maximum(sinks, lse)
                share = tl.exp2(lse - new_maximum)
                total = tl.exp2(sinks - new_maximum) + share
                result = result * share[:, None] / total[:, None]
                lse = new_maximum + tl.log2(total)
            out_ptrs = out_ptr + (query_row * out_stride_n + first_head * out_stride_h)
            out_ptrs += (tokens * out_stride_n + heads * out_stride_h)[:, None] + columns[None, :]
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=row_columns)
            if HAS_LSE:
                lse_ptrs = lse_ptr + (query_row * num_heads + first_head) + (tokens * num_heads + heads)
                tl.store(lse_ptrs, lse * 0.6931471805599453, mask=row_mask)
        else:
            slot = unit if IS_FIXED else 2 * program + (unit == seq_begin).to(tl.int32)
            first_row = slot.to(tl.int64) * max_query_len * num_heads + first_head
            partial_rows = tokens * num_heads + heads
            partial_ptrs = (partial_ptr + first_row * HEAD_DIM) + partial_rows[:, None] * HEAD_DIM + columns[None, :]
            tl.store(partial_ptrs, result, mask=row_columns)
            tl.store(partial_lse_ptr + first_row + partial_rows, lse, mask=row_mask)
        unit = piece_end
        seq += (unit == seq_end).to(tl.int32)


class _Tile(NamedTuple):
    rows: int
    tokens: int
    num_warps: int = 4


def _tile(geometry: Geometry, block_dim: int, num_rows: int) -> _Tile:
    """The largest tile that compiles without spills for every target; speed on a GPU has not decided it yet.

    In float32 the products run on the plain multipliers, whose operands fill the registers early.
    """
    if geometry.alignment < WIDE_ALIGNMENT:
        return _Tile(MIN_DOT, 16, num_warps=8)
    if geometry.dtype == torch.float32:
        return _Tile(MIN_DOT, 64) if block_dim <= 64 else _Tile(MIN_DOT, 16, num_warps=4 if block_dim <= 128 else 8)
    rows, has_whole_rows = max(MIN_DOT, next_power_of_two(num_rows)), geometry.alignment == MAX_ALIGNMENT
    if block_dim <= 64:
        return _Tile(min(rows, 64 if has_whole_rows else 32), 64)
    if block_dim <= 128:
        rows = min(rows, 32 if has_whole_rows else MIN_DOT)
        return _Tile(rows, 64 if rows == MIN_DOT or geometry.block_size >= 64 else 32)
    return _Tile(MIN_DOT, 32 if geometry.block_size >= 32 and has_whole_rows else 16)


@lru_cache(maxsize=256)
def attend_variant(
    geometry: Geometry,
    backend: Backend,
    options: Options,
    *,
    unit_tokens: int = TILE_TOKENS,
    min_share: int = 1,
    is_fixed: bool = False,
    has_lse: bool = False,
    max_query_len: int = 1,
) -> Variant:
    """How the attention over the shares is built for a cache, a GPU family, a layer's options and a plan.

    With fixed splits the tile has as many rows for one query token as for several: the same bits for each.
    """
    block_dim = max(MIN_DOT, next_power_of_two(geometry.head_dim))
    num_rows = geometry.group_size * (1 if is_fixed else max_query_len)
    tile = _tile(geometry, block_dim, num_rows)
    pipelined = backend == "cuda" and geometry.alignment >= WIDE_ALIGNMENT
    pointer = pointer_to(geometry.dtype)
    strides = [f"{name}_stride_{axis}" for name in ("out", "query") for axis in "nh"]
    cache_strides = [f"{name}_stride_{axis}" for name in ("key", "value") for axis in "bthd"]
    return Variant(
        kernel=_attend_kernel,
        signature={
            **dict.fromkeys(("lse_ptr", "partial_ptr", "partial_lse_ptr"), "*fp32"),
            **dict.fromkeys(("out_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr"), pointer),
            **dict.fromkeys(("block_tables_ptr", "seq_lens_ptr", "query_starts_ptr"), "*i32"),
            **dict.fromkeys(("unit_starts_ptr", "program_seqs_ptr"), "*i32"),
            "sinks_ptr": "*fp32",
            **dict.fromkeys(("score_factor", "cap_factor"), "fp32"),
            **dict.fromkeys(
                ("window", "num_seqs", "max_query_len", *strides, *cache_strides, "table_stride"),
                "i32",
            ),
        },
        constants={
            "HEAD_DIM": geometry.head_dim,
            "GROUP": geometry.group_size,
            "CACHE_BLOCK": geometry.block_size,
            "BLOCK_DIM": block_dim,
            "BLOCK_ROWS": tile.rows,
            "BLOCK_KV": tile.tokens,
            "UNIT_TOKENS": unit_tokens,
            "MIN_SHARE": min_share,
            "IS_FIXED": is_fixed,
            "WIDE": geometry.is_wide,
            "ALIGNMENT": geometry.alignment,
            "UPCAST": needs_upcast(geometry.dtype),
            "HAS_WINDOW": options.window,
            "HAS_SOFT_CAP": options.soft_cap,
            "HAS_SINKS": options.sinks,
            "HAS_LSE": has_lse,
        },
        num_warps=tile.num_warps,
        num_stages=1 if not pipelined else 2 if geometry.dtype == torch.float32 else 3,  # 3: the copies of two tiles
        unit_strides=("key_stride_d", "value_stride_d"),
    )
