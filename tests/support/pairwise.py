"""Small sets of test cases in which every pair of values of any two factors occurs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[int, int], tuple[int, int]]  # ((factor, value), (factor, value)) as indices, factors ascending


def product(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return every combination of the factors' values."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return a deterministic cover of all pairs: greedily, each case started from a pair that is not covered yet."""
    sizes = [len(values) for values in factors.values()]
    if len(sizes) < 2:
        return product(factors)
    missing = _all_pairs(sizes)
    rows = []
    while missing:
        row = _best_row(sizes, missing)
        for pair in _pairs_of(row):
            missing.pop(pair, None)
        rows.append(row)
    return [{name: values[row[index]] for index, (name, values) in enumerate(factors.items())} for row in rows]


def _all_pairs(sizes: Sequence[int]) -> dict[Pair, None]:
    """Return all pairs as an ordered set, so that every process makes the same cover."""
    return {
        ((first, a), (second, b)): None
        for first, second in itertools.combinations(range(len(sizes)), 2)
        for a in range(sizes[first])
        for b in range(sizes[second])
    }


def _pairs_of(row: Sequence[int]) -> list[Pair]:
    return list(itertools.combinations(enumerate(row), 2))


def _best_row(sizes: Sequence[int], missing: Mapping[Pair, None]) -> list[int]:
    """Start from the first missing pair, then give each other factor the value that covers most missing pairs."""
    chosen = dict(next(iter(missing)))
    for factor, size in enumerate(sizes):
        if factor not in chosen:
            chosen[factor] = max(range(size), key=lambda value: _gain(factor, value, chosen, missing))
    return [chosen[factor] for factor in range(len(sizes))]


def _gain(factor: int, value: int, chosen: Mapping[int, int], missing: Mapping[Pair, None]) -> int:
    pairs = (tuple(sorted(((factor, value), other))) for other in chosen.items())
    return sum(pair in missing for pair in pairs)
