"""Prefill attention over the paged KV cache: packed chunks of new tokens, causal over cached prefix and new tokens.

The tiles of query rows of a step's chunks are listed on the device. A launch has as many programs as there can be
tiles, which follows from numbers that the host has; the heaviest tiles come first, so that the last programs to end are
short ones, and a long chunk leaves no empty programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from pagestream_kernels.checks import check_dtype, check_last_stride, check_output, check_same_device, check_shape
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
from pagestream_kernels.tables.rows import MIN_DOT, ChipTable, Row, row_for, table_of
from pagestream_kernels.tiles import aligned, attend_tiles, has_nan, table_of_seq

MAX_ROWS = 128  # of a tile


def paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    rounds_slopes: bool = False,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    table_rows: Tensor | None = None,
    out: Tensor | None = None,
    plan: PrefillPlan | None = None,
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
        scale: factor of the scores, usually head_dim ** -0.5.
        window: most tokens that a token sees, itself included; None: all.
        soft_cap: bound c of the scores, which become c * tanh(score / c); None: none.
        sinks: (num_heads,) float32: a score of each head that takes part in the softmax and has no value; None: none.
        slopes: (num_heads,) float32: what a score of each head loses with every token between key and query (ALiBi),
            after the soft cap; None: nothing.
        rounds_slopes: whether a score gains its slope with every token before the key instead, rounded to bfloat16.
        key_scales, value_scales: (num_blocks, num_kv_heads) float32 of a cache of float8 (`docs/kernels.md`), or None.
        table_rows: (num_seqs,) int64: of each sequence its row of `block_tables` (not checked), which may then have
            any number of rows; None: one each, in their order.
        out: as query, or None for a new tensor.
        plan: `plan_prefill` of the same, made once for all layers of a step; None makes one.

    Returns:
        (total_new_tokens, num_heads, head_dim), accumulated in float32.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: PagedAttention, https://arxiv.org/abs/2309.06180; FlashAttention-2, https://arxiv.org/abs/2307.08691.
    """
    geometry, out = _check(
        query, key_cache, value_cache, (block_tables, table_rows), cu_query_lens, seq_lens, key_scales, value_scales,
        scale, out,
    )  # fmt: skip
    options = check_options(window, soft_cap, sinks, query.shape[1], slopes, rounds_slopes=rounds_slopes)
    check_same_device(("query", query), ("sinks", sinks), ("slopes", slopes))
    require_launchable(query.device, reference="paged_prefill_attention_reference")
    farthest = max(MAX_ROWS * rows.stride(0) + geometry.group_size * rows.stride(1) for rows in (query, out))
    geometry = replace(geometry, is_wide=geometry.is_wide or farthest >= 2**31)
    cut = {"table": table_of(query.device), "has_table_rows": table_rows is not None}
    variant = prefill_variant(geometry, current_backend(), options, **cut)
    score_factor, cap_factor = score_factors(scale, soft_cap)
    if plan is None:
        plan = plan_prefill(
            query, key_cache, value_cache, cu_query_lens, seq_lens, key_scales=key_scales, value_scales=value_scales
        )
    if plan.rows_per_tile != variant.constants["BLOCK_ROWS"]:
        raise KernelArgumentError(
            f"plan: expected one for tiles of {variant.constants['BLOCK_ROWS']} rows, got {plan.rows_per_tile}"
        )
    arguments = {
        "out_ptr": out,
        "query_ptr": query,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "block_tables_ptr": block_tables,
        "table_rows_ptr": seq_lens if table_rows is None else table_rows,
        "cu_query_lens_ptr": cu_query_lens,
        "seq_lens_ptr": seq_lens,
        "tile_seqs_ptr": plan.tile_seqs,
        "tile_rows_ptr": plan.tile_rows,
        "key_scales_ptr": seq_lens if key_scales is None else key_scales,
        "value_scales_ptr": seq_lens if value_scales is None else value_scales,
        "sinks_ptr": seq_lens if sinks is None else sinks,
        "slopes_ptr": seq_lens if slopes is None else slopes,
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
        **scale_strides(key_scales),
    }
    grid = (key_cache.shape[2], plan.tile_seqs.shape[0])
    variant.launch((*grid, 1), arguments)
    # Where a result is a NaN, by a second launch: 0 times an infinite value is one for rows that don't see it, too.
    exact = prefill_variant(geometry, current_backend(), options, **cut, is_exact=True)
    exact.launch((*grid, cdiv(plan.rows_per_tile, exact.constants["BLOCK_ROWS"])), arguments)
    return out


def paged_prefill_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    rounds_slopes: bool = False,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    table_rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_prefill_attention` in torch, on any device; same arguments, result and errors. One pass a sequence."""
    geometry, out = _check(
        query, key_cache, value_cache, (block_tables, table_rows), cu_query_lens, seq_lens, key_scales, value_scales,
        scale, out,
    )  # fmt: skip
    check_options(window, soft_cap, sinks, query.shape[1], slopes, rounds_slopes=rounds_slopes)
    if table_rows is not None:
        block_tables = block_tables[table_rows]
    starts = cu_query_lens.tolist()
    for index, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[index], starts[index + 1]
        first_position = seq_len - (end - start)
        begin = 0 if window is None else max(0, first_position + 1 - window)
        table = block_tables[index : index + 1, : cdiv(seq_len, geometry.block_size)]
        keys = gather_cache(key_cache, table, key_scales)[0, begin:seq_len]
        values = gather_cache(value_cache, table, value_scales)[0, begin:seq_len]
        positions = torch.arange(begin, seq_len, device=query.device)
        rows = first_position + torch.arange(end - start, device=query.device)[:, None]
        visible = positions <= rows
        if window is not None:
            visible &= positions > rows - window
        grouped = query[start:end].float().reshape(end - start, keys.shape[1], geometry.group_size, geometry.head_dim)
        scores = capped_reference(torch.einsum("qkgd,tkd->kgqt", grouped, keys) * scale, soft_cap)
        if slopes is not None:
            own = slopes.view(keys.shape[1], -1, 1, 1)
            scores = scores + ((own * positions).bfloat16().float() if rounds_slopes else own * (positions - rows))
        own_sinks = None if sinks is None else sinks.view(keys.shape[1], -1, 1)
        weights = softmax_reference(scores.masked_fill(~visible, -math.inf), own_sinks)
        out[start:end] = torch.einsum("kgqt,tkd->qkgd", weights, values).flatten(1, 2).to(out.dtype)
    return out


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: tuple[Tensor, Tensor | None],
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    scale: float,
    out: Tensor | None,
) -> tuple[Geometry, Tensor]:
    geometry = check_cache(query, key_cache, value_cache, key_scales, value_scales)
    check_shape("seq_lens", seq_lens, (None,), meaning="(num_seqs,)")
    num_seqs = seq_lens.shape[0]
    check_tables(*tables, seq_lens, num_seqs)
    check_dtype("cu_query_lens", cu_query_lens, (torch.int32,))
    check_shape("cu_query_lens", cu_query_lens, (num_seqs + 1,), meaning="(num_seqs + 1,)")
    check_last_stride("cu_query_lens", cu_query_lens)
    if not math.isfinite(scale):
        raise KernelArgumentError(f"scale: expected a finite number, got {scale}")
    check_same_device(
        ("query", query),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_tables", tables[0]),
        ("table_rows", tables[1]),
        ("cu_query_lens", cu_query_lens),
        ("seq_lens", seq_lens),
        ("key_scales", key_scales),
        ("value_scales", value_scales),
        ("out", out),
    )
    return geometry, check_output("out", out, query, query.shape)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The work of one step's prefill, for every layer with the same cache and number of heads."""

    tile_seqs: Tensor  # (num_tiles,) int32: the sequence of each tile, -1 behind the last
    tile_rows: Tensor  # (num_tiles,) int32: its first row, of which a token has one for each head of a group
    rows_per_tile: int


def plan_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> PrefillPlan:
    """List the tiles of a step's prefill chunks. Arguments and errors are those of `paged_prefill_attention`."""
    geometry = check_cache(query, key_cache, value_cache, key_scales, value_scales)
    check_dtype("seq_lens", seq_lens, (torch.int32,))
    check_shape("seq_lens", seq_lens, (None,), meaning="(num_seqs,)")
    num_seqs = seq_lens.shape[0]
    check_dtype("cu_query_lens", cu_query_lens, (torch.int32,))
    check_shape("cu_query_lens", cu_query_lens, (num_seqs + 1,), meaning="(num_seqs + 1,)")
    device, group = seq_lens.device, geometry.group_size
    table = table_of(device)
    rows = row_for("paged_prefill", geometry, Options(), group, backend=current_backend(), table=table).rows
    num_tiles = cdiv(query.shape[0] * group, rows) + num_seqs  # each chunk's last tile may be a part of one
    if num_seqs == 0:
        nothing = torch.zeros(0, dtype=torch.int32, device=device)
        return PrefillPlan(nothing, nothing, rows)
    counts = (cu_query_lens.diff() * group + (rows - 1)) // rows
    ends = counts.cumsum(0)
    tiles = torch.arange(num_tiles, device=device)
    seqs = torch.searchsorted(ends, tiles, right=True)
    exists = seqs < num_seqs
    seqs = seqs.clamp(max=num_seqs - 1)
    first_rows = (tiles - ends[seqs] + counts[seqs]) * rows
    num_unseen = (cu_query_lens.diff()[seqs] - (first_rows + rows) // group).clamp(min=0)
    weights = torch.where(exists, seq_lens[seqs] - num_unseen, -1)
    order = weights.argsort(descending=True, stable=True)
    return PrefillPlan(
        tile_seqs=torch.where(exists, seqs, -1)[order].int(), tile_rows=first_rows[order].int(), rows_per_tile=rows
    )


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
    "slopes_ptr",
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
    slopes_ptr: tl.tensor,
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
    HAS_SLOPES: tl.constexpr,
    ROUNDS_SLOPES: tl.constexpr,
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
        slopes = 0.0
        if HAS_SLOPES:
            slopes = tl.load(slopes_ptr + first_head + heads, mask=row_mask, other=0.0)
        factors = (score_factor, cap_factor, window, slopes)
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
                HAS_SLOPES=HAS_SLOPES,
                ROUNDS_SLOPES=ROUNDS_SLOPES,
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
            "slopes_ptr": "*fp32" if options.slopes else "*i32",
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
            "HAS_SLOPES": options.slopes,
            "ROUNDS_SLOPES": options.rounds_slopes,
            "IS_EXACT": is_exact,
        },
        num_warps=row.warps,
        num_stages=row.stages,
        unit_strides=geometry.unit_strides,
    )
