"""Slots: which rows a stage keeps state for, and where."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream_engine.errors import InvariantViolation

_NONE = -1


class RowSlots:
    """Slots for the rows that use a stage, so that its arrays are as long as most such rows at a time."""

    def __init__(self, max_rows: int) -> None:
        self.version = 0
        """Rises whenever a row gets or loses its slot."""
        self._slot_of_row = np.full(max_rows, _NONE, dtype=np.int64)
        self._row_of_slot: list[int] = []
        self._free: list[int] = []

    def take(self, row: int) -> int:
        """Return a slot for `row`.

        Raises:
            InvariantViolation: it has one.
        """
        if self._slot_of_row[row] != _NONE:
            raise InvariantViolation(f"row {row} of the sampling batch is taken")
        if not self._free:
            self._free.append(len(self._row_of_slot))
            self._row_of_slot.append(_NONE)
        slot = self._free.pop()
        self._slot_of_row[row] = slot
        self._row_of_slot[slot] = row
        self.version += 1
        return slot

    def free(self, row: int) -> None:
        """Give back the slot of `row`, if it has one."""
        slot = int(self._slot_of_row[row])
        if slot != _NONE:
            self._slot_of_row[row] = _NONE
            self._row_of_slot[slot] = _NONE
            self._free.append(slot)
            self.version += 1

    def free_slots(self, slots: NDArray[np.int64]) -> None:
        """Give back slots that are taken."""
        for slot in slots.tolist():
            self.free(self._row_of_slot[slot])

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each row; -1 for those without."""
        return self._slot_of_row[rows]

    @property
    def num_taken(self) -> int:
        """Rows that have a slot."""
        return len(self._row_of_slot) - len(self._free)

    def __len__(self) -> int:
        """Return how many slots there are, free ones included."""
        return len(self._row_of_slot)


def grown(table: Tensor, *shape: int) -> Tensor:
    """Return a table of at least `shape` that begins with `table`'s entries, the rest zeros: itself if it is as large.

    A size that grows becomes a power of two, so that a table that is filled row by row is seldom copied.
    """
    pairs = list(zip(table.shape, shape, strict=True))
    if all(have >= want for have, want in pairs):
        return table
    sizes = [have if have >= want else 1 << (want - 1).bit_length() for have, want in pairs]
    larger = torch.zeros(sizes, dtype=table.dtype, device=table.device)
    larger[tuple(slice(0, size) for size in table.shape)] = table
    return larger
