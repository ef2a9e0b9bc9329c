"""How one decode step's KV work is divided among programs: on the device, from the lengths, in one launch.

A sequence's cache is cut into units by absolute position. All units of a step, sequence after sequence, are one list,
of which each program of a KV head takes an equal share; a sequence is cut where a share ends. The arithmetic of shares
is here, for this kernel and for those of `paged_decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pagestream_kernels.checks import check_dtype, check_last_stride, check_same_device, check_shape
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.runtime import Variant, cdiv, jit, kernel, num_processors, require_launchable, tl
from pagestream_kernels.tables.rows import PROGRAMS_PER_PROCESSOR

MIN_SHARE = 4  # units; below this the merge costs more than the cut saves; a GPU has not yet confirmed it
FIXED_SPLIT_TOKENS = 512
"""Unit of batch-invariant decode: merging its results adds 1.6 % to the traffic of a 16-bit cache."""
MAX_QUERY_LEN = 16


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work of one decode step, for every layer with its window.

    Grid and scratch follow from host values only (numbers of sequences, heads and processors), so that a captured
    graph can replay them; what each program does comes from the lengths.
    """

    unit_starts: Tensor  # (num_seqs + 1,) int32: running sum of the sequences' units, each has one at least
    program_seqs: Tensor  # (num_programs,) int32: the sequence of each program's first unit
    query_starts: Tensor  # (num_seqs + 1,) int32: running sum of the sequences' query rows
    unit_tokens: int
    min_share: int  # units of a program, as far as there are so many; at least half as many where they do not divide
    is_fixed: bool  # each unit is reduced alone
    num_slots: int  # pieces of sequences that the scratch has room for
    max_query_len: int

    @property
    def num_programs(self) -> int:
        """Programs per KV head."""
        return self.program_seqs.shape[0]


def plan_decode(
    seq_lens: Tensor,
    *,
    num_kv_heads: int,
    split_tokens: int | None = None,
    max_seq_len: int | None = None,
    window: int | None = None,
    cu_query_lens: Tensor | None = None,
    max_query_len: int = 1,
    programs_per_processor: int = PROGRAMS_PER_PROCESSOR,
) -> DecodePlan:
    """Divide the KV work of `seq_lens` among programs, by one launch; a plan serves every layer of the step.

    Args:
        seq_lens: (num_seqs,) int32: tokens in the cache.
        num_kv_heads: each share is taken once per KV head.
        split_tokens: None divides the units evenly and merges a sequence's pieces as they come: at most two per
            program. A multiple of 64 cuts sequences at its multiples, whatever else is in the batch, and merges in
            their order: a row's result then depends on nothing but its sequence.
        max_seq_len: a bound on the lengths; needed with `split_tokens`, to bound the scratch.
        window: of the layers that the plan serves: units before it are no work.
        cu_query_lens: (num_seqs + 1,) int32: running sum of the sequences' query rows; None: one each.
        max_query_len: a bound on a sequence's query rows, at most 16.
        programs_per_processor: that run at a time: as many as `programs_per_processor` says of the layers' cache.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device, or a number out of range.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.
    """
    plan = _outline(
        seq_lens,
        num_kv_heads,
        split_tokens,
        max_seq_len,
        window,
        cu_query_lens,
        max_query_len,
        programs_per_processor,
    )
    require_launchable(seq_lens.device, reference="plan_decode_reference")
    variant = plan_variant(
        unit_tokens=plan.unit_tokens,
        min_share=plan.min_share,
        has_window=window is not None,
        has_rows=cu_query_lens is not None,
    )
    variant.launch(
        (cdiv(plan.num_programs, variant.constants["BLOCK_PROGRAMS"]),),
        {
            "unit_starts_ptr": plan.unit_starts,
            "program_seqs_ptr": plan.program_seqs,
            "query_starts_ptr": plan.query_starts,
            "seq_lens_ptr": seq_lens,
            "window": window or 0,
            "num_seqs": seq_lens.shape[0],
            "num_programs": plan.num_programs,
        },
    )
    return plan


def plan_decode_reference(
    seq_lens: Tensor,
    *,
    num_kv_heads: int,
    split_tokens: int | None = None,
    max_seq_len: int | None = None,
    window: int | None = None,
    cu_query_lens: Tensor | None = None,
    max_query_len: int = 1,
    programs_per_processor: int = PROGRAMS_PER_PROCESSOR,
) -> DecodePlan:
    """`plan_decode` in torch, on any device, by a dozen operations; same arguments, result and errors."""
    plan = _outline(
        seq_lens,
        num_kv_heads,
        split_tokens,
        max_seq_len,
        window,
        cu_query_lens,
        max_query_len,
        programs_per_processor,
    )
    num_seqs, num_programs, device = seq_lens.shape[0], plan.num_programs, seq_lens.device
    if cu_query_lens is None:
        torch.arange(num_seqs + 1, out=plan.query_starts)
    units = (seq_lens + (plan.unit_tokens - 1)) // plan.unit_tokens
    if window is not None:
        units -= (seq_lens - plan.query_starts.diff() + (1 - window)).clamp(min=0) // plan.unit_tokens
    unit_starts = torch.nn.functional.pad(units.clamp(min=1).cumsum(0, dtype=torch.int32), (1, 0))
    num_units = unit_starts[-1:].long()
    shares = ((num_units + (plan.min_share - 1)) // plan.min_share).clamp(min=1, max=num_programs)
    begins = torch.arange(num_programs, device=device) * num_units // shares
    plan.unit_starts.copy_(unit_starts)
    plan.program_seqs.copy_(torch.searchsorted(unit_starts[1:], begins, right=True))
    return plan


def _outline(
    seq_lens: Tensor,
    num_kv_heads: int,
    split_tokens: int | None,
    max_seq_len: int | None,
    window: int | None,
    cu_query_lens: Tensor | None,
    max_query_len: int,
    programs_per_processor: int,
) -> DecodePlan:
    """Check the arguments of `plan_decode`, and return its plan with tensors that are to be filled."""
    check_dtype("seq_lens", seq_lens, (torch.int32,))
    check_shape("seq_lens", seq_lens, (None,), meaning="(num_seqs,)")
    check_last_stride("seq_lens", seq_lens)
    num_seqs, device = seq_lens.shape[0], seq_lens.device
    if num_kv_heads < 1:
        raise KernelArgumentError(f"num_kv_heads: expected at least 1, got {num_kv_heads}")
    if not 1 <= max_query_len <= MAX_QUERY_LEN:
        raise KernelArgumentError(f"max_query_len: expected 1 to {MAX_QUERY_LEN}, got {max_query_len}")
    is_fixed = split_tokens is not None
    unit, min_share = (TILE_TOKENS, MIN_SHARE) if split_tokens is None else (split_tokens, 1)
    num_programs = cdiv(programs_per_processor * num_processors(device), num_kv_heads)
    num_slots = 2 * num_programs
    if split_tokens is not None:
        num_slots = max(1, num_seqs * _most_splits(split_tokens, max_seq_len, window, max_query_len))
    if cu_query_lens is not None:
        check_dtype("cu_query_lens", cu_query_lens, (torch.int32,))
        check_shape("cu_query_lens", cu_query_lens, (num_seqs + 1,), meaning="(num_seqs + 1,)")
        check_last_stride("cu_query_lens", cu_query_lens)
        check_same_device(("seq_lens", seq_lens), ("cu_query_lens", cu_query_lens))
    unit_starts, own_starts = torch.empty(2, num_seqs + 1, dtype=torch.int32, device=device)
    return DecodePlan(
        unit_starts=unit_starts,
        program_seqs=torch.empty(num_programs, dtype=torch.int32, device=device),
        query_starts=own_starts if cu_query_lens is None else cu_query_lens,
        unit_tokens=unit,
        min_share=min_share,
        is_fixed=is_fixed,
        num_slots=num_slots,
        max_query_len=max_query_len,
    )


def _most_splits(split_tokens: int, max_seq_len: int | None, window: int | None, max_query_len: int) -> int:
    """Fixed splits of the longest sequence that a plan may meet."""
    if split_tokens < 1 or split_tokens % TILE_TOKENS or max_seq_len is None or max_seq_len < 0:
        raise KernelArgumentError(
            f"split_tokens: expected a multiple of {TILE_TOKENS} and a max_seq_len, got {split_tokens} and "
            f"{max_seq_len}"
        )
    splits = cdiv(max_seq_len, split_tokens)
    if window is None:
        return splits
    return min(splits, cdiv(window + max_query_len - 2, split_tokens) + 1)  # wherever it begins


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


TILE_TOKENS = 64  # a unit of equal shares; a multiple of every tile
LOWEST = tl.constexpr(-1e30) if tl is not None else -1e30  # below every score, so that no difference of two is a NaN


@jit
def shares_of(num_units: tl.tensor, num_programs: tl.tensor, MIN_SHARE: tl.constexpr) -> tl.tensor:
    """Programs that take a share of `num_units`; the last of `num_programs` have none if there are few."""
    return tl.minimum(num_programs, (num_units + MIN_SHARE - 1) // MIN_SHARE).to(tl.int64)


@jit
def share_begin(program: tl.tensor, num_units: tl.tensor, num_shares: tl.tensor) -> tl.tensor:
    """The first unit of a program: shares differ by one unit at most, and end with the last unit."""
    begin = program.to(tl.int64) * num_units // num_shares
    return tl.minimum(begin, num_units).to(tl.int32)


@jit
def program_of(unit: tl.tensor, num_units: tl.tensor, num_shares: tl.tensor) -> tl.tensor:
    """The program whose share holds a unit: the inverse of `share_begin`."""
    return (((unit + 1).to(tl.int64) * num_shares - 1) // num_units).to(tl.int32)


@jit
def first_seen(seq_len: tl.tensor, query_len: tl.tensor, window: tl.tensor, HAS_WINDOW: tl.constexpr) -> tl.tensor:
    """The first token that a sequence's first row sees; blocks before its own may be gone."""
    seen = seq_len * 0
    if HAS_WINDOW:
        seen = tl.maximum(seq_len - query_len + 1 - window, 0)
    return seen
