"""Attention of each program over its share of a step's tiles, and how the kernel is built."""

from __future__ import annotations

from functools import lru_cache

from pagestream_kernels.decode.shares import LOWEST, TILE_TOKENS, first_seen, share_begin, shares_of
from pagestream_kernels.paging import Geometry, Options
from pagestream_kernels.runtime import (
    Backend,
    Variant,
    kernel,
    needs_upcast,
    next_power_of_two,
    pointer_to,
    tl,
)
from pagestream_kernels.tables.rows import MIN_DOT, ChipTable, Row, row_for
from pagestream_kernels.tiles import aligned, attend_tiles, has_nan, table_of_seq


@kernel(
    "lse_ptr",
    "block_tables_ptr",
    "table_rows_ptr",
    "seq_lens_ptr",
    "query_starts_ptr",
    "unit_starts_ptr",
    "program_seqs_ptr",
    "key_scales_ptr",
    "value_scales_ptr",
    "sinks_ptr",
    "window",
    "num_seqs",
    "max_query_len",
    "table_stride",
    "scale_stride",
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
    table_rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    unit_starts_ptr: tl.tensor,
    program_seqs_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
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
    scale_stride: tl.tensor,
    scale_stride_h: tl.tensor,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    UNIT_TOKENS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    IS_FIXED: tl.constexpr,
    HAS_TABLE_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    MEETS_HIDDEN: tl.constexpr,
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
        key_stride_h, value_stride_h = aligned(key_stride_h, ALIGNMENT), aligned(value_stride_h, ALIGNMENT)
        key_stride_t = aligned(key_stride_t, ALIGNMENT)
        if not HAS_SCALES:  # else the tokens are neighbours, and their stride of 1 is not among what is aligned
            value_stride_t = aligned(value_stride_t, ALIGNMENT)
    key_head_ptr = key_cache_ptr + kv_head.to(tl.int64) * key_stride_h
    value_head_ptr = value_cache_ptr + kv_head.to(tl.int64) * value_stride_h
    key_scales_ptr += kv_head.to(tl.int64) * scale_stride_h
    value_scales_ptr += kv_head.to(tl.int64) * scale_stride_h
    key_strides = (key_stride_b, key_stride_t, key_stride_d)
    strides = key_strides + (value_stride_b, value_stride_t, value_stride_d, scale_stride)  # noqa: RUF005 - Triton's tuples
    factors = (score_factor, cap_factor, window)
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
        table_ptr = table_of_seq(seq, block_tables_ptr, table_rows_ptr, table_stride, HAS_TABLE_ROWS)
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

        if HAS_SCALES:
            query = query.to(tl.float16)
        state = (
            tl.full((BLOCK_ROWS,), LOWEST, tl.float32),
            tl.zeros((BLOCK_ROWS,), tl.float32),
            tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32),
        )
        cache = (key_head_ptr, value_head_ptr, key_scales_ptr, value_scales_ptr, table_ptr)
        bounds = (begin, seen, end)
        maximum, total, accumulator = attend_tiles(
            *(state, query, row_positions, 0, columns, cache, strides, bounds, factors),
            *(HEAD_DIM, CACHE_BLOCK, BLOCK_DIM, BLOCK_KV, WIDE, UPCAST, HAS_SCALES, HAS_WINDOW, HAS_SOFT_CAP),
            SKIPS_MASKS=False,
            IS_EXACT=False,
        )
        if MEETS_HIDDEN:  # noqa: SIM102 - the first is decided when the kernel is built
            # -- a NaN: some value is not finite, and rows that do not see it may have met it --
            if has_nan(accumulator, row_mask):
                maximum, total, accumulator = attend_tiles(
                    *(state, query, row_positions, 0, columns, cache, strides, bounds, factors),
                    *(HEAD_DIM, CACHE_BLOCK, BLOCK_DIM, BLOCK_KV, WIDE, UPCAST, HAS_SCALES, HAS_WINDOW, HAS_SOFT_CAP),
                    SKIPS_MASKS=False,
                    IS_EXACT=True,
                )

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
    has_table_rows: bool = False,
    max_query_len: int = 1,
    table: ChipTable | None = None,
    row: Row | None = None,
) -> Variant:
    """How the attention over the shares is built for a cache, a GPU family, a layer's options and a plan.

    It is cut as `row` says, or else by the chip's table. With fixed splits the tile has as many rows for one query
    token as for several: the same bits for each.
    """
    block_dim = max(MIN_DOT, next_power_of_two(geometry.head_dim))
    num_rows = geometry.group_size * (1 if is_fixed else max_query_len)
    has_rows = is_fixed or max_query_len > 1  # with fixed splits one build serves any number
    if row is None:
        row = row_for("paged_decode", geometry, options, num_rows, backend=backend, table=table)
    most_rows, tokens, warps = row.rows, row.tokens, row.warps
    if has_rows:  # with both forms of the loop, whose registers larger tiles and fewer warps do not always hold
        is_small = block_dim <= 64 and backend == "cuda" and geometry.dtype.itemsize == 2
        most_rows, warps = min(row.rows, 32 if is_small else MIN_DOT), max(row.warps, 8)
        if geometry.dtype.itemsize == 4:
            tokens = min(tokens, 32)
    strides = [f"{name}_stride_{axis}" for name in ("out", "query") for axis in "nh"]
    cache_strides = [f"{name}_stride_{axis}" for name in ("key", "value") for axis in "bthd"]
    return Variant(
        kernel=_attend_kernel,
        signature={
            **dict.fromkeys(("lse_ptr", "partial_ptr", "partial_lse_ptr"), "*fp32"),
            **dict.fromkeys(("out_ptr", "query_ptr"), pointer_to(geometry.dtype)),
            **dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), pointer_to(geometry.cache_dtype)),
            **dict.fromkeys(("block_tables_ptr", "seq_lens_ptr", "query_starts_ptr"), "*i32"),
            **dict.fromkeys(("unit_starts_ptr", "program_seqs_ptr"), "*i32"),
            "table_rows_ptr": "*i64" if has_table_rows else "*i32",
            **dict.fromkeys(("key_scales_ptr", "value_scales_ptr", "sinks_ptr"), "*fp32"),
            **dict.fromkeys(("score_factor", "cap_factor"), "fp32"),
            **dict.fromkeys(
                ("window", "num_seqs", "max_query_len", *strides, *cache_strides),
                "i32",
            ),
            **dict.fromkeys(
                ("table_stride", "scale_stride", "scale_stride_h"),
                "i32",
            ),
        },
        constants={
            "HEAD_DIM": geometry.head_dim,
            "GROUP": geometry.group_size,
            "CACHE_BLOCK": geometry.block_size,
            "BLOCK_DIM": block_dim,
            "BLOCK_ROWS": min(most_rows, max(MIN_DOT, next_power_of_two(num_rows))),
            "BLOCK_KV": tokens,
            "UNIT_TOKENS": unit_tokens,
            "MIN_SHARE": min_share,
            "IS_FIXED": is_fixed,
            "HAS_TABLE_ROWS": has_table_rows,
            "WIDE": geometry.is_wide,
            "ALIGNMENT": geometry.alignment,
            "UPCAST": not geometry.has_scales and needs_upcast(geometry.dtype),
            "HAS_SCALES": geometry.has_scales,
            "MEETS_HIDDEN": has_rows or geometry.has_scales,
            "HAS_WINDOW": options.window,
            "HAS_SOFT_CAP": options.soft_cap,
            "HAS_SINKS": options.sinks,
            "HAS_LSE": has_lse,
        },
        num_warps=warps,
        num_stages=row.stages,
        unit_strides=geometry.unit_strides,
    )
