"""Attention of each program over one tile of query rows, and how the kernel is built."""

from __future__ import annotations

from functools import lru_cache

from pagestream_kernels.paging import Geometry, Options
from pagestream_kernels.runtime import Backend, Variant, kernel, needs_upcast, next_power_of_two, pointer_to, tl
from pagestream_kernels.tables.rows import MIN_DOT, ChipTable, Row, row_for
from pagestream_kernels.tiles import aligned, attend_tiles, has_nan, table_of_seq

LOWEST = tl.constexpr(-1e30) if tl is not None else -1e30  # below every score

EXACT_ROWS = 16  # of a tile that is computed again
EXACT_WARPS = 4


@kernel(
    "block_tables_ptr",
    "table_rows_ptr",
    "cu_query_lens_ptr",
    "seq_lens_ptr",
    "tile_seqs_ptr",
    "tile_rows_ptr",
    "key_scales_ptr",
    "value_scales_ptr",
    "sinks_ptr",
    "window",
    "table_stride",
    "scale_stride",
    pointers=("out_ptr", "query_ptr"),
    strides=("out_stride_n", "out_stride_h", "query_stride_n", "query_stride_h"),
)
def _prefill_kernel(  # noqa: PLR0915 - one kernel is one function
    out_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    table_rows_ptr: tl.tensor,
    cu_query_lens_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    tile_seqs_ptr: tl.tensor,
    tile_rows_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
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
    scale_stride: tl.tensor,
    scale_stride_h: tl.tensor,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HAS_TABLE_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    # Not within a condition: there a stride of 1, which Triton makes a constant, could not become a number.
    if ALIGNMENT < 16:  # Triton's own specialisation knows of 16 only
        key_stride_b, value_stride_b = aligned(key_stride_b, ALIGNMENT), aligned(value_stride_b, ALIGNMENT)
        key_stride_h, value_stride_h = aligned(key_stride_h, ALIGNMENT), aligned(value_stride_h, ALIGNMENT)
        key_stride_t = aligned(key_stride_t, ALIGNMENT)
        if not HAS_SCALES:  # else the tokens are neighbours, and their stride of 1 is not among what is aligned
            value_stride_t = aligned(value_stride_t, ALIGNMENT)
    kv_head = tl.program_id(0).to(tl.int64)
    seq = tl.load(tile_seqs_ptr + tl.program_id(1)).to(tl.int64)
    if seq >= 0:
        # -- a row is one token of one query head: the heads that share a KV head share its loads --
        tile_start = tl.load(tile_rows_ptr + tl.program_id(1)) + tl.program_id(2) * BLOCK_ROWS
        rows = tile_start + tl.arange(0, BLOCK_ROWS)
        query_start = tl.load(cu_query_lens_ptr + seq)
        query_len = tl.load(cu_query_lens_ptr + seq + 1) - query_start
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

        key_head_ptr = key_cache_ptr + kv_head * key_stride_h
        value_head_ptr = value_cache_ptr + kv_head * value_stride_h
        key_scales_ptr += kv_head * scale_stride_h
        value_scales_ptr += kv_head * scale_stride_h
        table_ptr = table_of_seq(seq, block_tables_ptr, table_rows_ptr, table_stride, HAS_TABLE_ROWS)

        # Tiles begin at multiples of their size, so that a row's sums do not depend on where its chunk begins.
        seen = 0
        if HAS_WINDOW:
            seen = tl.maximum(first_position + 1 - window, 0)
        begin = seen // BLOCK_KV * BLOCK_KV
        end = tl.minimum(seq_len, context_len + (tile_start + BLOCK_ROWS - 1) // GROUP + 1)
        if HAS_SCALES:
            query = query.to(tl.float16)

        # -- before the first tile: a sink is a score; behind a window a row's first tiles may hide every token from it,
        # and a maximum of -inf would give exp2(-inf + inf). Without one position 0 is visible to every row --
        lowest = tl.full((BLOCK_ROWS,), LOWEST if HAS_WINDOW else float("-inf"), tl.float32)
        before = tl.zeros((BLOCK_ROWS,), tl.float32)
        if HAS_SINKS:
            lowest = tl.load(sinks_ptr + first_head + heads, mask=row_mask, other=0.0) * 1.4426950408889634
            before += 1.0
        state = (lowest, before, tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32))
        cache = (key_head_ptr, value_head_ptr, key_scales_ptr, value_scales_ptr, table_ptr)
        key_strides = (key_stride_b, key_stride_t, key_stride_d)
        strides = key_strides + (value_stride_b, value_stride_t, value_stride_d, scale_stride)  # noqa: RUF005 - Triton's tuples
        bounds = (begin, seen, end)
        factors = (score_factor, cap_factor, window)
        out_ptrs = out_ptr + (first_row * out_stride_n + first_head * out_stride_h)
        out_ptrs += (tokens * out_stride_n + heads * out_stride_h)[:, None] + columns[None, :]
        needed = True
        if IS_EXACT:
            # -- a NaN: some value is not finite, and rows that do not see it may have met it --
            found = tl.load(out_ptrs, mask=query_mask, other=0.0).to(tl.float32)
            needed = has_nan(found, row_mask)
        if needed:
            _, total, accumulator = attend_tiles(
                *(state, query, row_positions, first_position, columns, cache, strides, bounds, factors),
                *(HEAD_DIM, CACHE_BLOCK, BLOCK_DIM, BLOCK_KV, WIDE, UPCAST, HAS_SCALES, HAS_WINDOW, HAS_SOFT_CAP),
                SKIPS_MASKS=True,
                IS_EXACT=IS_EXACT,
            )
            result = (accumulator / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptrs, result, mask=query_mask)


@lru_cache(maxsize=256)
def prefill_variant(
    geometry: Geometry,
    backend: Backend,
    options: Options,
    *,
    table: ChipTable | None = None,
    row: Row | None = None,
    has_table_rows: bool = False,
    is_exact: bool = False,
) -> Variant:
    """How the kernel is built for a cache, a GPU family and the options of a layer.

    It is cut as `row` says, or else by the chip's table; with `is_exact`, which repeats what came out as NaN, into
    smaller tiles of rows.
    """
    block_dim = max(MIN_DOT, next_power_of_two(geometry.head_dim))
    if row is None:
        row = row_for("paged_prefill", geometry, options, geometry.group_size, backend=backend, table=table)
    if is_exact:
        row = row._replace(rows=min(row.rows, EXACT_ROWS), warps=EXACT_WARPS, stages=1)
    strides = [f"{name}_stride_{axis}" for name in ("out", "query") for axis in "nh"]
    cache_strides = [f"{name}_stride_{axis}" for name in ("key", "value") for axis in "bthd"]
    return Variant(
        kernel=_prefill_kernel,
        signature={
            **dict.fromkeys(("out_ptr", "query_ptr"), pointer_to(geometry.dtype)),
            **dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), pointer_to(geometry.cache_dtype)),
            **dict.fromkeys(("block_tables_ptr", "cu_query_lens_ptr", "seq_lens_ptr"), "*i32"),
            **dict.fromkeys(("tile_seqs_ptr", "tile_rows_ptr"), "*i32"),
            "table_rows_ptr": "*i64" if has_table_rows else "*i32",
            **dict.fromkeys(("key_scales_ptr", "value_scales_ptr"), "*fp32" if geometry.has_scales else "*i32"),
            "sinks_ptr": "*fp32" if options.sinks else "*i32",
            **dict.fromkeys(("score_factor", "cap_factor"), "fp32"),
            **dict.fromkeys(
                ("window", *strides, *cache_strides, "table_stride", "scale_stride", "scale_stride_h"), "i32"
            ),
        },
        constants={
            "HEAD_DIM": geometry.head_dim,
            "GROUP": geometry.group_size,
            "CACHE_BLOCK": geometry.block_size,
            "BLOCK_DIM": block_dim,
            "BLOCK_ROWS": row.rows,
            "BLOCK_KV": row.tokens,
            "HAS_TABLE_ROWS": has_table_rows,
            "WIDE": geometry.is_wide,
            "ALIGNMENT": geometry.alignment,
            "UPCAST": not geometry.has_scales and needs_upcast(geometry.dtype),
            "HAS_SCALES": geometry.has_scales,
            "HAS_WINDOW": options.window,
            "HAS_SOFT_CAP": options.soft_cap,
            "HAS_SINKS": options.sinks,
            "IS_EXACT": is_exact,
        },
        num_warps=row.warps,
        num_stages=row.stages,
        unit_strides=geometry.unit_strides,
    )
