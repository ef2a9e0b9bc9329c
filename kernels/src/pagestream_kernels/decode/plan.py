"""The list of a decode step's units and where each program's share of it begins, and how the kernel is built."""

from __future__ import annotations

from functools import lru_cache

from pagestream_kernels.decode.shares import first_seen, share_begin, shares_of
from pagestream_kernels.runtime import Variant, jit, kernel, tl

BLOCK_SEQS = 256  # sequences that are added up at a time
BLOCK_PROGRAMS = 32  # of decode attention, whose first sequences one program finds


@jit
def _units_of(
    seqs: tl.tensor,
    seq_lens_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    window: tl.tensor,
    num_seqs: tl.tensor,
    UNIT_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_ROWS: tl.constexpr,
) -> tl.tensor:
    """Units of each sequence: at least one, whose program writes zeros where there is no token; 0 behind the last."""
    mask = seqs < num_seqs
    seq_lens = tl.load(seq_lens_ptr + seqs, mask=mask, other=0)
    query_lens = seqs * 0 + 1
    if HAS_WINDOW and HAS_ROWS:
        query_lens = tl.load(query_starts_ptr + seqs + 1, mask=mask, other=0)
        query_lens -= tl.load(query_starts_ptr + seqs, mask=mask, other=0)
    units = (seq_lens + UNIT_TOKENS - 1) // UNIT_TOKENS
    units -= first_seen(seq_lens, query_lens, window, HAS_WINDOW) // UNIT_TOKENS
    return tl.where(mask, tl.maximum(units, 1), 0)


@kernel(
    "unit_starts_ptr",
    "program_seqs_ptr",
    "query_starts_ptr",
    "seq_lens_ptr",
    "window",
    "num_seqs",
    "num_programs",
)
def _plan_kernel(
    unit_starts_ptr: tl.tensor,
    program_seqs_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    window: int,
    num_seqs: int,
    num_programs: int,
    UNIT_TOKENS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
) -> None:
    # Every program adds up all sequences, so that none waits for another; the first one writes the sums.
    writes = tl.program_id(0) == 0
    own_seqs = tl.arange(0, BLOCK_SEQS)
    num_units = 0
    for first in range(0, num_seqs, BLOCK_SEQS):
        seqs = first + own_seqs
        units = _units_of(seqs, seq_lens_ptr, query_starts_ptr, window, num_seqs, UNIT_TOKENS, HAS_WINDOW, HAS_ROWS)
        num_units += tl.sum(units, axis=0)

    # -- a share begins in the sequence behind all those that end before it --
    programs = tl.program_id(0) * BLOCK_PROGRAMS + tl.arange(0, BLOCK_PROGRAMS)
    num_shares = tl.maximum(shares_of(num_units, num_programs, MIN_SHARE), 1)
    begins = share_begin(programs, num_units, num_shares)
    program_seqs = tl.zeros((BLOCK_PROGRAMS,), tl.int32)
    begin = 0
    for first in range(0, num_seqs, BLOCK_SEQS):
        seqs = first + own_seqs
        units = _units_of(seqs, seq_lens_ptr, query_starts_ptr, window, num_seqs, UNIT_TOKENS, HAS_WINDOW, HAS_ROWS)
        ends = begin + tl.cumsum(units, axis=0)
        is_before = (ends[None, :] <= begins[:, None]) & (seqs < num_seqs)[None, :]
        program_seqs += tl.sum(is_before.to(tl.int32), axis=1)
        begin += tl.sum(units, axis=0)
        mask = (seqs < num_seqs) & writes
        tl.store(unit_starts_ptr + seqs + 1, ends, mask=mask)
        if not HAS_ROWS:
            tl.store(query_starts_ptr + seqs + 1, seqs + 1, mask=mask)
    tl.store(program_seqs_ptr + programs, program_seqs, mask=programs < num_programs)
    tl.store(unit_starts_ptr, 0, mask=writes)
    if not HAS_ROWS:
        tl.store(query_starts_ptr, 0, mask=writes)


@lru_cache(maxsize=64)
def plan_variant(*, unit_tokens: int, min_share: int, has_window: bool, has_rows: bool) -> Variant:
    """How the plan is built; with `has_rows` the numbers of query rows are given, without it they are written."""
    return Variant(
        kernel=_plan_kernel,
        signature={
            **dict.fromkeys(("unit_starts_ptr", "program_seqs_ptr", "query_starts_ptr", "seq_lens_ptr"), "*i32"),
            **dict.fromkeys(("window", "num_seqs", "num_programs"), "i32"),
        },
        constants={
            "UNIT_TOKENS": unit_tokens,
            "MIN_SHARE": min_share,
            "HAS_WINDOW": has_window,
            "HAS_ROWS": has_rows,
            "BLOCK_SEQS": BLOCK_SEQS,
            "BLOCK_PROGRAMS": BLOCK_PROGRAMS,
        },
        num_warps=4,
        num_stages=1,
    )
