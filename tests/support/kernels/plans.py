"""The plan of decode attention against a plain model of it: what each program does with a plan, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import pagestream_kernels as kernels
import torch
from support.pairwise import Case


class Piece(NamedTuple):
    """What a program reduces at a time, of a sequence."""

    seq: int
    tiles: range  # units, counted from the sequence's start
    slot: int | None  # of the scratch; None where the piece is the whole sequence


LENGTHS: dict[str, Sequence[int]] = {
    "empty": [0],
    "1": [1],
    "borders": [63, 64, 65, 0, 511, 512, 513],
    "padded": [900, *([1] * 7)],
    "many": [*range(0, 3000, 10)],  # more than are added up at a time
    "long": [131072, 0, 5],
}


def check_plan_decode(case: Case, device: torch.device) -> None:
    """A case has `lengths`, a name of LENGTHS or numbers, and the options of `plan_decode`; with `rows` each sequence
    has so many query rows, or as many as its length where that is less."""
    lengths = LENGTHS[case["lengths"]] if isinstance(case["lengths"], str) else case["lengths"]
    rows, window, split_tokens = case["rows"], case["window"], case["split_tokens"]
    counts = [1 if rows is None else min(rows, length) for length in lengths]
    starts = [0, *accumulate(counts)]
    options = {
        "num_kv_heads": case["num_kv_heads"],
        "programs_per_processor": case.get("programs", 2),
        "split_tokens": split_tokens,
        "max_seq_len": max(lengths),
        "window": window,
    }
    if rows is not None:
        options["cu_query_lens"] = torch.tensor(starts, dtype=torch.int32, device=device)
        options["max_query_len"] = rows
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = kernels.plan_decode(seq_lens, **options)
    reference = kernels.plan_decode_reference(seq_lens, **options)
    for name in ("unit_starts", "program_seqs", "query_starts"):
        assert torch.equal(getattr(plan, name), getattr(reference, name)), name
    assert plan.query_starts.tolist() == starts

    expected = []
    firsts = [0 if window is None else max(0, n - rows_ + 1 - window) for n, rows_ in zip(lengths, counts, strict=True)]
    for seq, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        begin, end = first // plan.unit_tokens, -(-length // plan.unit_tokens)
        expected += [(seq, tile) for tile in range(begin, max(end, begin + 1))]
    programs = list(walk(plan, [first // plan.unit_tokens for first in firsts]))
    assert [(piece.seq, tile) for pieces in programs for piece in pieces for tile in piece.tiles] == expected
    shares = [sum(len(piece.tiles) for piece in pieces) for pieces in programs]
    busy = [share for share in shares if share]
    assert max(busy) - min(busy) <= 1
    assert 2 * min(busy) >= min(plan.min_share, len(expected))
    slots = [piece.slot for pieces in programs for piece in pieces if piece.slot is not None]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < plan.num_slots for slot in slots)


def walk(plan: kernels.DecodePlan, skipped: Sequence[int]) -> Iterator[list[Piece]]:
    """Follow each program through its share, as decode attention does; `skipped` units of each sequence are before its
    window."""
    starts, seqs = plan.unit_starts.tolist(), plan.program_seqs.tolist()
    total = starts[-1]
    num_shares = min(plan.num_programs, -(-total // plan.min_share))
    for program, first_seq in enumerate(seqs):
        seq = first_seq
        unit, end = (min(total, index * total // num_shares) for index in (program, program + 1))
        pieces = []
        while unit < end:
            piece_end = unit + 1 if plan.is_fixed else min(starts[seq + 1], end)
            slot = unit if plan.is_fixed else 2 * program + (unit == starts[seq])
            is_whole = unit == starts[seq] and piece_end == starts[seq + 1]
            first = skipped[seq] - starts[seq]
            pieces.append(Piece(seq, range(unit + first, piece_end + first), None if is_whole else slot))
            unit = piece_end
            seq += unit == starts[seq + 1]
        yield pieces
