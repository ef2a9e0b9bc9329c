"""Batch-invariant linears: which row counts give a row the same bits, and how every batch is brought to one of them."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""(rows, in features) -> (rows, out features)."""
TRIED_AT_LOAD = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
"""Row counts of which the largest agreeing set is sought; others are tried when they first occur."""
_BANK_ROWS = 64
_FREE_ROWS = 8
"""Up to this many rows a product costs about as much as one row does: it waits for the weight, not for arithmetic."""
_FREE_SHARE = 1.1
"""Most computed rows per wanted row at which padding is called free."""


class RowCounts:
    """The row counts at which one shape of linear agrees bit for bit, found by trying them on this machine.

    A library chooses its kernel, and with it the order of additions, by the shape; the values don't matter. So one
    trial with random rows settles a row count for all linears of a shape, for as long as the number of threads stays.
    The set is a function of the trials alone, never of a clock: two processes on equal machines choose the same.
    """

    def __init__(self, product: Product, in_features: int, dtype: torch.dtype) -> None:
        """`product` is any linear of the shape; it is kept, and runs whenever a new row count is tried."""
        generator = torch.Generator().manual_seed(0)
        self._bank = torch.randn(_BANK_ROWS, in_features, generator=generator).to(dtype)
        self._product = product
        self._agreeing, self._reference = self._choose()
        self._is_known = dict.fromkeys(TRIED_AT_LOAD, False) | dict.fromkeys(self._agreeing, True)

    def apply(self, product: Product, x: Tensor) -> Tensor:
        """`product(x)`, each row with the bits that it has in any other batch.

        Args:
            product: a linear of this shape.
            x: (rows, in features), at least one row.
        """
        rows = x.shape[0]
        agrees = self._is_known.get(rows)
        if agrees is None:
            agrees = self._try(rows)
        if agrees:
            return product(x)
        size = self._smallest_from(rows)
        if size is None:
            return torch.cat([self.apply(product, part) for part in torch.split(x, self._agreeing[-1])])
        padded = x.new_zeros(size, x.shape[1])
        padded[:rows] = x
        return product(padded)[:rows]

    @property
    def is_free(self) -> bool:
        """Whether all batches run nearly as fast as they would without padding and cutting."""
        return all(_cost(rows, self._agreeing) <= max(_FREE_ROWS, rows * _FREE_SHARE) for rows in TRIED_AT_LOAD)

    @property
    def digest(self) -> bytes:
        """Of the bits of trial rows: equal where two machines compute alike."""
        return hashlib.sha256(self._reference.contiguous().view(torch.uint8).numpy().tobytes()).digest()

    def _choose(self) -> tuple[list[int], Tensor]:
        """The set of row counts that costs the least padding, ascending, and its rows' results."""
        sets: list[tuple[list[int], Tensor]] = []
        for rows in reversed(TRIED_AT_LOAD):
            reference = self._product(_tiled(self._bank, rows))[:_BANK_ROWS]
            for members, known in sets:
                if self._agrees(rows, known):
                    members.insert(0, rows)
                    break
            else:
                if self._agrees(rows, reference):
                    sets.append(([rows], reference))
        return min(sets, key=lambda found: _total_cost(found[0]))

    def _try(self, rows: int) -> bool:
        agrees = self._agrees(rows, self._reference)
        self._is_known[rows] = agrees
        if agrees:
            insort(self._agreeing, rows)
        return agrees

    def _agrees(self, rows: int, reference: Tensor) -> bool:
        """Whether all rows of such a batch, wherever they stand in it, get the bits that they have in `reference`."""
        results = self._product(_tiled(self._bank[: len(reference)], rows))
        return torch.equal(results, _tiled(reference, rows))

    def _smallest_from(self, rows: int) -> int | None:
        place = bisect_left(self._agreeing, rows)
        return self._agreeing[place] if place < len(self._agreeing) else None


def _tiled(bank: Tensor, rows: int) -> Tensor:
    return bank.repeat(-(-rows // len(bank)), 1)[:rows].contiguous()


def _cost(rows: int, sizes: list[int]) -> int:
    """Modelled cost of so many rows, in rows, where only batches of these sizes are computed."""
    whole, rest = divmod(rows, sizes[-1])
    computed = whole * sizes[-1] + (sizes[bisect_left(sizes, rest)] if rest else 0)
    further_parts = whole - 1 + bool(rest)
    return max(_FREE_ROWS, computed) + further_parts * _FREE_ROWS


def _total_cost(sizes: list[int]) -> float:
    """Cost per wanted row, summed over small and large batches alike."""
    return sum(_cost(rows, sizes) / rows for rows in TRIED_AT_LOAD)
