"""Which units of a plan's list a program takes: the arithmetic that both decode kernels share."""

from __future__ import annotations

from pagestream_kernels.runtime import jit, tl

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
