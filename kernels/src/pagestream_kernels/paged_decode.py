"""Decode attention over the paged KV cache: the last query tokens of each sequence, its KV work in equal shares.

One kernel attends, each program over its share of a step's tiles (`decode_plan.py`); another one merges the pieces that
a sequence was cut into.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from pagestream_kernels.checks import check_dtype, check_last_stride, check_output, check_same_device, check_shape
from pagestream_kernels.decode_plan import (
    LOWEST,
    TILE_TOKENS,
    DecodePlan,
    first_seen,
    plan_decode,
    program_of,
    share_begin,
    shares_of,
)
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.paging import (
    Geometry,
    Options,
    capped_reference,
    check_cache,
    check_options,
    check_tables,
    gather_cache,
    scale_strides,
    score_factors,
    softmax_reference,
)
from pagestream_kernels.runtime import (
    Backend,
    Variant,
    cdiv,
    current_backend,
    kernel,
    needs_upcast,
    next_power_of_two,
    pointer_to,
    require_launchable,
    tl,
)
from pagestream_kernels.tables.rows import MIN_DOT, ChipTable, Row, programs_per_processor, row_for, table_of
from pagestream_kernels.tiles import aligned, attend_tiles, has_nan, table_of_seq


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    rounds_slopes: bool = False,
    cu_query_lens: Tensor | None = None,
    max_query_len: int = 1,
    table_rows: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """Attention of the last 1 to 16 tokens of each sequence over everything in its blocks up to each of them.

    Args:
        query: (rows, num_heads, head_dim), float32, float16 or bfloat16, last dimension contiguous: the sequences'
            tokens one after the other. num_heads is a multiple of num_kv_heads: head h reads KV head
            h // (num_heads // num_kv_heads). head_dim <= 256.
        key_cache, value_cache: (num_blocks, block_size, num_kv_heads, head_dim) of the same dtype with any strides,
            a permuted view too; keys and values of the query's tokens are already in it. block_size is a power of two
            from 8 to 256; from 64 on a tile is read from one block.
        block_tables: (num_seqs, max_blocks) int32. Entries within what a sequence's tokens see must be blocks of the
            cache (not checked); the others are never read.
        seq_lens: (num_seqs,) int32: tokens in the cache, at most max_blocks * block_size (not checked). A row that
            sees no token gives zeros.
        scale: factor of the scores, usually head_dim ** -0.5.
        window: most tokens that a token sees, itself included; None: all.
        soft_cap: bound c of the scores, which become c * tanh(score / c); None: none.
        sinks: (num_heads,) float32: a score of each head that takes part in the softmax and has no value; None: none.
        slopes: (num_heads,) float32: what a score of each head loses with every token between key and query (ALiBi),
            after the soft cap; None: nothing.
        rounds_slopes: whether a score gains its slope with every token before the key instead, rounded to bfloat16.
        cu_query_lens: (num_seqs + 1,) int32: 0, then the running sum of the sequences' rows (not checked); None: one
            row each.
        max_query_len: a bound on a sequence's rows (not checked).
        table_rows: (num_seqs,) int64: of each sequence its row of `block_tables` (not checked), which may then have
            any number of rows; None: one each, in their order.
        out: as query, or None for a new tensor.
        lse: (rows, num_heads) float32 or None: filled with the natural logarithm of each softmax's sum, sinks
            included.
        key_scales, value_scales: (num_blocks, num_kv_heads) float32 of a cache of float8 (`docs/kernels.md`), or None.
        plan: `plan_decode(seq_lens, ...)` with this window and these query lengths, made once for all layers of a
            step; None makes one.

    Returns:
        (rows, num_heads, head_dim), accumulated in float32.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: PagedAttention, https://arxiv.org/abs/2309.06180; Flash-Decoding,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html; equal shares: Stream-K, https://arxiv.org/abs/2301.03598.
    """
    geometry, out = _check(
        query, key_cache, value_cache, (block_tables, table_rows), seq_lens, cu_query_lens, key_scales, value_scales,
        scale, out, lse,
    )  # fmt: skip
    options = check_options(window, soft_cap, sinks, query.shape[1], slopes, rounds_slopes=rounds_slopes)
    check_same_device(("query", query), ("sinks", sinks), ("slopes", slopes))
    require_launchable(query.device, reference="paged_decode_attention_reference")
    (_, num_heads, head_dim), num_seqs, num_kv_heads = query.shape, seq_lens.shape[0], key_cache.shape[2]
    if num_seqs == 0:
        return out
    if plan is None:
        plan = plan_decode(
            seq_lens,
            num_kv_heads=num_kv_heads,
            window=window,
            cu_query_lens=cu_query_lens,
            max_query_len=max_query_len,
            programs_per_processor=programs_per_processor(query, key_cache, max_query_len),
        )
    check_shape("plan.unit_starts", plan.unit_starts, (num_seqs + 1,), meaning="(num_seqs + 1,)")
    if plan.max_query_len != max_query_len:
        raise KernelArgumentError(f"plan: expected one for max_query_len={max_query_len}, got {plan.max_query_len}")

    partial = query.new_empty((plan.num_slots, max_query_len, num_heads, head_dim), dtype=torch.float32)
    partial_lse = query.new_empty((plan.num_slots, max_query_len, num_heads), dtype=torch.float32)
    schedule = {
        "unit_tokens": plan.unit_tokens,
        "min_share": plan.min_share,
        "is_fixed": plan.is_fixed,
        "has_lse": lse is not None,
    }
    farthest = max(max_query_len * rows.stride(0) + geometry.group_size * rows.stride(1) for rows in (query, out))
    geometry = replace(geometry, is_wide=geometry.is_wide or farthest >= 2**31)
    attend = attend_variant(
        geometry,
        current_backend(),
        options,
        max_query_len=max_query_len,
        has_table_rows=table_rows is not None,
        table=table_of(query.device),
        **schedule,
    )
    score_factor, cap_factor = score_factors(scale, soft_cap)
    shared = {
        "out_ptr": out,
        "lse_ptr": partial_lse if lse is None else lse,
        "partial_ptr": partial,
        "partial_lse_ptr": partial_lse,
        "seq_lens_ptr": seq_lens,
        "query_starts_ptr": plan.query_starts,
        "unit_starts_ptr": plan.unit_starts,
        "sinks_ptr": partial_lse if sinks is None else sinks,
        "window": window or 0,
        "num_seqs": num_seqs,
        "out_stride_n": out.stride(0),
        "out_stride_h": out.stride(1),
    }
    row_tiles = cdiv(max_query_len * geometry.group_size, attend.constants["BLOCK_ROWS"])
    attend.launch(
        (plan.num_programs, num_kv_heads, row_tiles),
        {
            **shared,
            "query_ptr": query,
            "key_cache_ptr": key_cache,
            "value_cache_ptr": value_cache,
            "block_tables_ptr": block_tables,
            "table_rows_ptr": seq_lens if table_rows is None else table_rows,
            "program_seqs_ptr": plan.program_seqs,
            "key_scales_ptr": partial_lse if key_scales is None else key_scales,
            "value_scales_ptr": partial_lse if value_scales is None else value_scales,
            "slopes_ptr": partial_lse if slopes is None else slopes,
            "score_factor": score_factor,
            "cap_factor": cap_factor,
            "max_query_len": max_query_len,
            "query_stride_n": query.stride(0),
            "query_stride_h": query.stride(1),
            **{f"key_stride_{axis}": stride for axis, stride in zip("bthd", key_cache.stride(), strict=True)},
            **{f"value_stride_{axis}": stride for axis, stride in zip("bthd", value_cache.stride(), strict=True)},
            "table_stride": block_tables.stride(0),
            **scale_strides(key_scales),
        },
    )
    options = options._replace(soft_cap=False, slopes=False, rounds_slopes=False)
    merge_variant(head_dim=head_dim, dtype=query.dtype, options=options, **schedule).launch(
        (num_seqs, num_heads, max_query_len), {**shared, "num_programs": plan.num_programs}
    )
    return out


def paged_decode_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    rounds_slopes: bool = False,
    cu_query_lens: Tensor | None = None,
    max_query_len: int = 1,
    table_rows: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """`paged_decode_attention` in torch, on any device; same arguments, result and errors, without a plan."""
    geometry, out = _check(
        query, key_cache, value_cache, (block_tables, table_rows), seq_lens, cu_query_lens, key_scales, value_scales,
        scale, out, lse,
    )  # fmt: skip
    check_options(window, soft_cap, sinks, query.shape[1], slopes, rounds_slopes=rounds_slopes)
    if table_rows is not None:
        block_tables = block_tables[table_rows]
    lengths = seq_lens.long()
    if cu_query_lens is not None:  # each row as a sequence that ends with it
        counts = cu_query_lens.diff().long()
        owners = torch.repeat_interleave(torch.arange(len(counts), device=query.device), counts)
        places = torch.arange(len(owners), device=query.device) - cu_query_lens[owners]
        lengths = lengths[owners] - counts[owners] + places + 1
        block_tables = block_tables[owners]
    keys = gather_cache(key_cache, block_tables, key_scales)
    values = gather_cache(value_cache, block_tables, value_scales)
    places = torch.arange(keys.shape[1], device=query.device)
    valid = places < lengths[:, None]
    if window is not None:
        valid &= places >= lengths[:, None] - window
    grouped = query.float().reshape(query.shape[0], keys.shape[2], geometry.group_size, geometry.head_dim)
    scores = capped_reference(torch.einsum("nkgd,ntkd->nkgt", grouped, keys) * scale, soft_cap)
    if slopes is not None:
        own = slopes.view(keys.shape[2], -1, 1)
        if rounds_slopes:
            scores = scores + (own * places).bfloat16().float()
        else:
            scores = scores + own * (places + 1 - lengths[:, None])[:, None, None]
    scores = scores.masked_fill(~valid[:, None, None], -math.inf)
    own_sinks = None if sinks is None else sinks.view(keys.shape[2], -1)
    weights = softmax_reference(scores, own_sinks).masked_fill((lengths <= 0)[:, None, None, None], 0.0)
    if lse is not None:
        sums = scores.logsumexp(dim=-1)
        lse.copy_((sums if own_sinks is None else torch.logaddexp(sums, own_sinks)).flatten(1))
    values = values.masked_fill(~valid[:, :, None, None], 0.0)
    return out.copy_(torch.einsum("nkgt,ntkd->nkgd", weights, values).flatten(1, 2))


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: tuple[Tensor, Tensor | None],
    seq_lens: Tensor,
    cu_query_lens: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    scale: float,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Geometry, Tensor]:
    geometry = check_cache(query, key_cache, value_cache, key_scales, value_scales)
    check_shape("seq_lens", seq_lens, (None,), meaning="(num_seqs,)")
    num_seqs = query.shape[0] if cu_query_lens is None else seq_lens.shape[0]
    check_tables(*tables, seq_lens, num_seqs)
    if cu_query_lens is not None:
        check_dtype("cu_query_lens", cu_query_lens, (torch.int32,))
        check_shape("cu_query_lens", cu_query_lens, (num_seqs + 1,), meaning="(num_seqs + 1,)")
        check_last_stride("cu_query_lens", cu_query_lens)
    if lse is not None:
        check_dtype("lse", lse, (torch.float32,))
        check_shape("lse", lse, tuple(query.shape[:2]), meaning="(rows, num_heads)")
        if not lse.is_contiguous():
            raise KernelArgumentError(f"lse: expected a contiguous tensor, got strides {lse.stride()}")
    if not math.isfinite(scale):
        raise KernelArgumentError(f"scale: expected a finite number, got {scale}")
    check_same_device(
        ("query", query),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_tables", tables[0]),
        ("table_rows", tables[1]),
        ("seq_lens", seq_lens),
        ("cu_query_lens", cu_query_lens),
        ("key_scales", key_scales),
        ("value_scales", value_scales),
        ("out", out),
        ("lse", lse),
    )
    return geometry, check_output("out", out, query, query.shape)


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
    "slopes_ptr",
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
    slopes_ptr: tl.tensor,
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
    HAS_SLOPES: tl.constexpr,
    ROUNDS_SLOPES: tl.constexpr,
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
    slopes = 0.0
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + first_head + heads)
    factors = (score_factor, cap_factor, window, slopes)
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
            HAS_SLOPES=HAS_SLOPES,
            ROUNDS_SLOPES=ROUNDS_SLOPES,
            SKIPS_MASKS=False,
            IS_EXACT=False,
        )
        if MEETS_HIDDEN:  # noqa: SIM102 - the first is decided when the kernel is built
            # -- a NaN: some value is not finite, and rows that do not see it may have met it --
            if has_nan(accumulator, row_mask):
                maximum, total, accumulator = attend_tiles(
                    *(state, query, row_positions, 0, columns, cache, strides, bounds, factors),
                    *(HEAD_DIM, CACHE_BLOCK, BLOCK_DIM, BLOCK_KV, WIDE, UPCAST, HAS_SCALES, HAS_WINDOW, HAS_SOFT_CAP),
                    HAS_SLOPES=HAS_SLOPES,
                    ROUNDS_SLOPES=ROUNDS_SLOPES,
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
            **dict.fromkeys(("key_scales_ptr", "value_scales_ptr", "sinks_ptr", "slopes_ptr"), "*fp32"),
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
            "HAS_SLOPES": options.slopes,
            "ROUNDS_SLOPES": options.rounds_slopes,
            "HAS_LSE": has_lse,
        },
        num_warps=warps,
        num_stages=row.stages,
        unit_strides=geometry.unit_strides,
    )


MERGED_PIECES = 16  # pieces merged at a time


@kernel(
    "lse_ptr",
    "seq_lens_ptr",
    "query_starts_ptr",
    "unit_starts_ptr",
    "sinks_ptr",
    "window",
    "num_seqs",
    "num_programs",
    pointers=("out_ptr",),
    strides=("out_stride_n", "out_stride_h"),
)
def _merge_kernel(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    unit_starts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    window: int,
    num_seqs: int,
    num_programs: int,
    out_stride_n: tl.tensor,
    out_stride_h: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    UNIT_TOKENS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    IS_FIXED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
) -> None:
    seq = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(2)
    num_heads = tl.num_programs(1)
    max_query_len = tl.num_programs(2)
    seq_begin = tl.load(unit_starts_ptr + seq)
    seq_end = tl.load(unit_starts_ptr + seq + 1)
    query_start = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - query_start

    # -- pieces [first, end), and the slot of piece 0 --
    if IS_FIXED:
        # By absolute position, so that the rows of a sequence merge their pieces in the same groups.
        first = first_seen(tl.load(seq_lens_ptr + seq), query_len, window, HAS_WINDOW) // UNIT_TOKENS
        end = first + seq_end - seq_begin
        base = seq_begin - first
    else:
        num_units = tl.load(unit_starts_ptr + num_seqs)
        num_shares = shares_of(num_units, num_programs, MIN_SHARE)
        base = program_of(seq_begin, num_units, num_shares)
        first = seq_begin * 0
        end = program_of(seq_end - 1, num_units, num_shares) + 1 - base
    if (end - first > 1) & (token < query_len):
        columns = tl.arange(0, BLOCK_DIM)
        column_mask = columns < HEAD_DIM
        maximum = LOWEST
        total = 0.0
        if HAS_SINKS:
            maximum = tl.load(sinks_ptr + head) * 1.4426950408889634
            total = 1.0
        accumulator = tl.zeros((BLOCK_DIM,), tl.float32)
        for tile in range(first // BLOCK_PIECES * BLOCK_PIECES, end, BLOCK_PIECES):
            pieces = tile + tl.arange(0, BLOCK_PIECES)
            mask = (pieces >= first) & (pieces < end)
            slots = base + pieces
            if not IS_FIXED:
                slots = 2 * slots + (pieces == 0).to(tl.int32)
            rows = (slots.to(tl.int64) * max_query_len + token) * num_heads + head
            lse = tl.load(partial_lse_ptr + rows, mask=mask, other=float("-inf"))
            partial_ptrs = partial_ptr + rows[:, None] * HEAD_DIM + columns[None, :]
            partial = tl.load(partial_ptrs, mask=mask[:, None] & column_mask[None, :], other=0.0)

            new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
            rescale = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(lse - new_maximum)
            total = total * rescale + tl.sum(weights, axis=0)
            accumulator = accumulator * rescale + tl.sum(partial * weights[:, None], axis=0)
            maximum = new_maximum

        result = accumulator / tl.where(total > 0.0, total, 1.0)
        query_row = (query_start + token).to(tl.int64)
        out_ptrs = out_ptr + query_row * out_stride_n + head * out_stride_h + columns
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=column_mask)
        if HAS_LSE:
            tl.store(lse_ptr + query_row * num_heads + head, (maximum + tl.log2(total)) * 0.6931471805599453)


@lru_cache(maxsize=64)
def merge_variant(
    *,
    head_dim: int,
    dtype: torch.dtype,
    options: Options,
    unit_tokens: int = TILE_TOKENS,
    min_share: int = 1,
    is_fixed: bool = False,
    has_lse: bool = False,
) -> Variant:
    """How the merge of pieces is built."""
    return Variant(
        kernel=_merge_kernel,
        signature={
            "out_ptr": pointer_to(dtype),
            **dict.fromkeys(("lse_ptr", "partial_ptr", "partial_lse_ptr", "sinks_ptr"), "*fp32"),
            **dict.fromkeys(("seq_lens_ptr", "query_starts_ptr", "unit_starts_ptr"), "*i32"),
            **dict.fromkeys(("window", "num_seqs", "num_programs", "out_stride_n", "out_stride_h"), "i32"),
        },
        constants={
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": next_power_of_two(head_dim),
            "BLOCK_PIECES": MERGED_PIECES,
            "UNIT_TOKENS": unit_tokens,
            "MIN_SHARE": min_share,
            "IS_FIXED": is_fixed,
            "HAS_WINDOW": options.window,
            "HAS_SINKS": options.sinks,
            "HAS_LSE": has_lse,
        },
        num_warps=4,
        num_stages=1,
    )
