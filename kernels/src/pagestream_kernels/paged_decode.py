"""Decode attention over the paged KV cache: one query token per sequence, split over the KV length, then reduced."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from pagestream_kernels.checks import check_output, check_same_device, check_shape
from pagestream_kernels.decode_plan import DecodePlan, plan_decode
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.paging import (
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

MIN_DOT = 16  # tl.dot's smallest side
REDUCE_SPLITS = 16  # splits merged at a time


@kernel(
    "block_tables_ptr",
    "seq_lens_ptr",
    "split_tokens_ptr",
    "slot_seqs_ptr",
    "seq_slots_ptr",
    "window",
    "num_seqs",
    "table_stride",
    pointers=("query_ptr",),
    strides=("query_stride_n", "query_stride_h"),
)
def _split_kernel(
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    split_tokens_ptr: tl.tensor,
    slot_seqs_ptr: tl.tensor,
    seq_slots_ptr: tl.tensor,
    score_factor: float,
    cap_factor: float,
    window: int,
    num_seqs: int,
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
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    WIDE_BLOCKS: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
) -> None:
    slot = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(slot_seqs_ptr + slot)
    if seq < num_seqs:
        split_tokens = tl.load(split_tokens_ptr)
        seq_len = tl.load(seq_lens_ptr + seq)
        start = (slot - tl.load(seq_slots_ptr + seq)) * split_tokens
        if HAS_WINDOW:
            start += tl.maximum(seq_len - window, 0)
        end = tl.minimum(start + split_tokens, seq_len)

        # -- the query heads that share this KV head, padded to tl.dot's smallest side --
        rows = tl.program_id(2) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        heads = kv_head * GROUP + rows
        columns = tl.arange(0, BLOCK_DIM)
        row_mask = rows < GROUP
        column_mask = columns < HEAD_DIM
        query_offsets = seq.to(tl.int64) * query_stride_n + heads.to(tl.int64) * query_stride_h
        query_ptrs = query_ptr + query_offsets[:, None] + columns[None, :]
        query = tl.load(query_ptrs, mask=row_mask[:, None] & column_mask[None, :], other=0.0)

        key_head_ptr = key_cache_ptr + kv_head.to(tl.int64) * key_stride_h
        value_head_ptr = value_cache_ptr + kv_head.to(tl.int64) * value_stride_h
        table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride

        maximum = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_HEADS,), tl.float32)
        accumulator = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
        for tile in range(start, end, BLOCK_KV):
            positions = tile + tl.arange(0, BLOCK_KV)
            token_mask = positions < end
            blocks = tl.load(table_ptr + positions // CACHE_BLOCK, mask=token_mask, other=0).to(tl.int64)
            offsets = positions % CACHE_BLOCK
            if WIDE_BLOCKS:
                offsets = offsets.to(tl.int64)

            # -- scores --
            key_ptrs = (
                key_head_ptr
                + (blocks * key_stride_b + offsets * key_stride_t)[None, :]
                + columns[:, None].to(tl.int64) * key_stride_d
            )
            keys = tl.load(key_ptrs, mask=column_mask[:, None] & token_mask[None, :], other=0.0)
            scores = ieee_dot(query, keys, UPCAST) * score_factor
            if HAS_SOFT_CAP:
                scores = soft_capped(scores, cap_factor)
            scores = tl.where(token_mask[None, :], scores, float("-inf"))

            # -- online softmax; the first token of a tile is always valid, so the maximum is finite --
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            rescale = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(scores - new_maximum[:, None])
            total = total * rescale + tl.sum(weights, axis=1)

            # -- weighted values --
            value_ptrs = (
                value_head_ptr
                + (blocks * value_stride_b + offsets * value_stride_t)[:, None]
                + columns[None, :].to(tl.int64) * value_stride_d
            )
            values = tl.load(value_ptrs, mask=token_mask[:, None] & column_mask[None, :], other=0.0)
            accumulator = accumulator * rescale[:, None]
            accumulator += ieee_dot(weights.to(values.dtype), values, UPCAST)
            maximum = new_maximum

        # -- partial result and the log2 of its softmax sum --
        partial_rows = (slot.to(tl.int64) * tl.num_programs(1) * GROUP) + heads
        partial_ptrs = partial_ptr + partial_rows[:, None] * HEAD_DIM + columns[None, :]
        partial_mask = row_mask[:, None] & column_mask[None, :]
        tl.store(partial_ptrs, accumulator / total[:, None], mask=partial_mask)
        tl.store(partial_lse_ptr + partial_rows, maximum + tl.log2(total), mask=row_mask)


@kernel("seq_slots_ptr", "sinks_ptr", pointers=("out_ptr",), strides=("out_stride_n", "out_stride_h"))
def _reduce_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    seq_slots_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_stride_n: tl.tensor,
    out_stride_h: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    seq = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    columns = tl.arange(0, BLOCK_DIM)
    column_mask = columns < HEAD_DIM
    first = tl.load(seq_slots_ptr + seq)
    end = tl.load(seq_slots_ptr + seq + 1)

    # total starts above zero, so that a sequence without tokens gives zeros and not 0 / 0
    maximum = float("-inf")
    total = 0.0
    if HAS_SINKS:
        maximum = tl.load(sinks_ptr + head) * 1.4426950408889634
        total = 1.0
    accumulator = tl.zeros((BLOCK_DIM,), tl.float32)
    for tile in range(first, end, BLOCK_SPLITS):
        slots = tile + tl.arange(0, BLOCK_SPLITS)
        mask = slots < end
        rows = slots.to(tl.int64) * num_heads + head
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
    out_ptrs = out_ptr + seq.to(tl.int64) * out_stride_n + head * out_stride_h + columns
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=column_mask)


def _tile(block_dim: int, geometry: Geometry) -> tuple[int, int]:
    """(query heads, KV tokens) of a tile at 4 warps: the largest that compiles without spills for every target.

    Speed on a GPU has not decided it yet. In float32 the products run on the plain multipliers, whose operands fill
    the registers early.
    """
    block_heads = max(MIN_DOT, next_power_of_two(geometry.group_size))
    if geometry.dtype == torch.float32:
        return MIN_DOT, 64 if block_dim <= 64 else 16
    return min(block_heads, 64), 64 if block_dim <= 128 else 32


@lru_cache(maxsize=256)
def split_variant(geometry: Geometry, backend: Backend, options: Options) -> Variant:
    """How the split kernel is built for a cache, a GPU family and the options of a layer."""
    block_dim = max(MIN_DOT, next_power_of_two(geometry.head_dim))
    block_heads, block_kv = _tile(block_dim, geometry)
    pointer = pointer_to(geometry.dtype)
    strides = [f"{name}_stride_{axis}" for name in ("key", "value") for axis in "bthd"]
    return Variant(
        kernel=_split_kernel,
        signature={
            **dict.fromkeys(("partial_ptr", "partial_lse_ptr"), "*fp32"),
            **dict.fromkeys(("query_ptr", "key_cache_ptr", "value_cache_ptr"), pointer),
            **dict.fromkeys(("block_tables_ptr", "seq_lens_ptr"), "*i32"),
            **dict.fromkeys(("split_tokens_ptr", "slot_seqs_ptr", "seq_slots_ptr"), "*i32"),
            **dict.fromkeys(("score_factor", "cap_factor"), "fp32"),
            **dict.fromkeys(
                ("window", "num_seqs", "query_stride_n", "query_stride_h", *strides, "table_stride"), "i32"
            ),
        },
        constants={
            "HEAD_DIM": geometry.head_dim,
            "GROUP": geometry.group_size,
            "CACHE_BLOCK": geometry.block_size,
            "BLOCK_DIM": block_dim,
            "BLOCK_HEADS": block_heads,
            "BLOCK_KV": block_kv,
            "WIDE_BLOCKS": geometry.has_wide_blocks,
            "UPCAST": needs_upcast(geometry.dtype),
            "HAS_WINDOW": options.window,
            "HAS_SOFT_CAP": options.soft_cap,
        },
        num_warps=4,
        num_stages=1 if backend == "hip" else 2,
        unit_strides=("key_stride_d", "value_stride_d"),
    )


@lru_cache(maxsize=64)
def reduce_variant(*, head_dim: int, dtype: torch.dtype, has_sinks: bool) -> Variant:
    """How the reduction over splits is built."""
    return Variant(
        kernel=_reduce_kernel,
        signature={
            "out_ptr": pointer_to(dtype),
            "partial_ptr": "*fp32",
            "partial_lse_ptr": "*fp32",
            "seq_slots_ptr": "*i32",
            "sinks_ptr": "*fp32" if has_sinks else "*i32",
            "out_stride_n": "i32",
            "out_stride_h": "i32",
        },
        constants={
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": next_power_of_two(head_dim),
            "BLOCK_SPLITS": REDUCE_SPLITS,
            "HAS_SINKS": has_sinks,
        },
        num_warps=4,
        num_stages=1,
    )


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
    out: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """Attention of one new token per sequence over everything in its blocks, its own key and value included.

    Args:
        query: (num_seqs, num_heads, head_dim), float32, float16 or bfloat16, last dimension contiguous. num_heads is
            a multiple of num_kv_heads: head h reads KV head h // (num_heads // num_kv_heads). head_dim <= 256.
        key_cache, value_cache: (num_blocks, block_size, num_kv_heads, head_dim) of the same dtype with any strides,
            a permuted view too. block_size is 8, 16, 32 or 64.
        block_tables: (num_seqs, max_blocks) int32. Entries within what a sequence's token sees must be blocks of the
            cache (not checked); the others are never read.
        seq_lens: (num_seqs,) int32: tokens in the cache, at most max_blocks * block_size (not checked). 0 gives zeros.
        scale: factor of the scores, usually head_dim ** -0.5.
        window: most tokens that a token sees, itself included; None: all.
        soft_cap: bound c of the scores, which become c * tanh(score / c); None: none.
        sinks: (num_heads,) float32: a score of each head that takes part in the softmax and has no value; None: none.
        out: as query, or None for a new tensor.
        plan: `plan_decode(seq_lens, ...)` with this window, made once for all layers of a step; None makes one.

    Returns:
        (num_seqs, num_heads, head_dim), accumulated in float32.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: PagedAttention, https://arxiv.org/abs/2309.06180; Flash-Decoding,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
    """
    geometry, out = _check(query, key_cache, value_cache, block_tables, seq_lens, scale, out)
    options = check_options(window, soft_cap, sinks, query.shape[1])
    check_same_device(("query", query), ("sinks", sinks))
    require_launchable(query.device, reference="paged_decode_attention_reference")
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    if num_seqs == 0:
        return out
    if plan is None:
        plan = plan_decode(seq_lens, num_kv_heads=num_kv_heads, window=window)
    check_shape("plan.seq_slots", plan.seq_slots, (num_seqs + 1,), meaning="(num_seqs + 1,)")

    partial = torch.empty((plan.num_slots, num_heads, head_dim), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((plan.num_slots, num_heads), dtype=torch.float32, device=query.device)
    split = split_variant(geometry, current_backend(), options._replace(sinks=False))
    score_factor, cap_factor = score_factors(scale, soft_cap)
    split.launch(
        (plan.num_slots, num_kv_heads, cdiv(geometry.group_size, split.constants["BLOCK_HEADS"])),
        {
            "partial_ptr": partial,
            "partial_lse_ptr": partial_lse,
            "query_ptr": query,
            "key_cache_ptr": key_cache,
            "value_cache_ptr": value_cache,
            "block_tables_ptr": block_tables,
            "seq_lens_ptr": seq_lens,
            "split_tokens_ptr": plan.split_tokens,
            "slot_seqs_ptr": plan.slot_seqs,
            "seq_slots_ptr": plan.seq_slots,
            "score_factor": score_factor,
            "cap_factor": cap_factor,
            "window": window or 0,
            "num_seqs": num_seqs,
            "query_stride_n": query.stride(0),
            "query_stride_h": query.stride(1),
            **{f"key_stride_{axis}": stride for axis, stride in zip("bthd", key_cache.stride(), strict=True)},
            **{f"value_stride_{axis}": stride for axis, stride in zip("bthd", value_cache.stride(), strict=True)},
            "table_stride": block_tables.stride(0),
        },
    )
    reduce_variant(head_dim=head_dim, dtype=query.dtype, has_sinks=options.sinks).launch(
        (num_seqs, num_heads),
        {
            "out_ptr": out,
            "partial_ptr": partial,
            "partial_lse_ptr": partial_lse,
            "seq_slots_ptr": plan.seq_slots,
            "sinks_ptr": plan.seq_slots if sinks is None else sinks,
            "out_stride_n": out.stride(0),
            "out_stride_h": out.stride(1),
        },
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
    out: Tensor | None = None,
) -> Tensor:
    """`paged_decode_attention` in torch, on any device; same arguments, result and errors, without a plan."""
    geometry, out = _check(query, key_cache, value_cache, block_tables, seq_lens, scale, out)
    keys = gather_cache(key_cache, block_tables).float()
    values = gather_cache(value_cache, block_tables).float()
    check_options(window, soft_cap, sinks, query.shape[1])
    places = torch.arange(keys.shape[1], device=query.device)
    valid = places < seq_lens[:, None]
    if window is not None:
        valid &= places >= seq_lens[:, None] - window
    grouped = query.float().reshape(query.shape[0], keys.shape[2], geometry.group_size, geometry.head_dim)
    scores = capped_reference(torch.einsum("nkgd,ntkd->nkgt", grouped, keys) * scale, soft_cap)
    scores = scores.masked_fill(~valid[:, None, None], -math.inf)
    weights = softmax_reference(scores, None if sinks is None else sinks.view(keys.shape[2], -1)).masked_fill(
        (seq_lens <= 0)[:, None, None, None], 0.0
    )
    values = values.masked_fill(~valid[:, :, None, None], 0.0)
    return out.copy_(torch.einsum("nkgt,ntkd->nkgd", weights, values).flatten(1, 2))


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None,
) -> tuple[Geometry, Tensor]:
    geometry = check_cache(query, key_cache, value_cache)
    check_tables(block_tables, seq_lens, query.shape[0])
    if not math.isfinite(scale):
        raise KernelArgumentError(f"scale: expected a finite number, got {scale}")
    check_same_device(
        ("query", query),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("out", out),
    )
    return geometry, check_output("out", out, query, query.shape)
