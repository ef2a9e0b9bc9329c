"""The merge of the pieces that a sequence was cut into, and how the kernel is built."""

from __future__ import annotations

from functools import lru_cache

import torch

from pagestream_kernels.decode.shares import LOWEST, TILE_TOKENS, first_seen, program_of, shares_of
from pagestream_kernels.paging import Options
from pagestream_kernels.runtime import Variant, kernel, next_power_of_two, pointer_to, tl

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
