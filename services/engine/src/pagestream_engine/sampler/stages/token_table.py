"""A table of token ids on the device: a list for each slot, with a value for each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream_engine.sampler.stages.slots import grown
from pagestream_engine.sampler.stages.stage import StageRows
from pagestream_engine.transfers import to_device


class TokenTable:
    """Lists of different token ids, padded by their first entry: what is written twice has the same value twice."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self._lengths = np.zeros(0, dtype=np.int64)

    def write(self, slot: int, token_ids: Sequence[int], values: Iterable[float] | None = None) -> None:
        """Store a slot's list, with a float32 value for each token or without.

        Args:
            slot: a slot of the table's stage.
            token_ids: at least one, all different.
        """
        length = len(token_ids)
        self._ids = _widened(self._ids, slot + 1, length)
        self._lengths = np.pad(self._lengths, (0, len(self._ids) - len(self._lengths)))
        self._lengths[slot] = length
        self._ids[slot] = _padded(np.asarray(token_ids, dtype=np.int64), self._ids)
        if values is not None:
            self._values = _widened(self._values, *self._ids.shape)
            self._values[slot] = _padded(np.fromiter(values, dtype=np.float32, count=length), self._values)

    def token_ids(self, rows: StageRows) -> Tensor:
        """Return (rows, longest list of these rows) int64."""
        return self._ids[rows.slots, : self._width(rows)]

    def values(self, rows: StageRows) -> Tensor:
        """Return (rows, longest list of these rows) float32."""
        return self._values[rows.slots, : self._width(rows)]

    def _width(self, rows: StageRows) -> int:
        return int(self._lengths[rows.host_slots].max())


def _widened(table: Tensor, num_slots: int, width: int) -> Tensor:
    """Return a table of at least this size, its lists padded as before."""
    before = table.shape[1]
    table = grown(table, num_slots, width)
    if 0 < before < table.shape[1]:
        table[:, before:] = table[:, :1]
    return table


def _padded(entries: NDArray[np.int64] | NDArray[np.float32], table: Tensor) -> Tensor:
    width = table.shape[1]
    padded = np.concatenate((entries, np.full(width - len(entries), entries[0], entries.dtype)))
    return to_device(torch.from_numpy(padded), table.device)
