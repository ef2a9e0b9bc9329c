"""Sampling parameters of the rows, as columns on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.transfers import to_device


class RowColumns:
    """What temperature, filters and noise need of each row. Rows are overwritten one by one, never all."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._floats = torch.zeros(max_rows, 3, dtype=torch.float32, device=device)
        self._integers = torch.zeros(max_rows, 3, dtype=torch.int64, device=device)
        self.temperatures, self.top_p, self.min_p = self._floats.unbind(1)
        self.top_k, self.seeds, self.positions = self._integers.unbind(1)
        """top_k: the vocabulary's size where all tokens stay. positions: index of the next token in its output, of rows
        that are drawn; the noise depends on it."""

    def write(self, row: int, params: SamplingParams, seed: int, position: int) -> None:
        """Overwrite a row."""
        device = self._floats.device
        floats = torch.tensor((params.temperature, params.top_p, params.min_p))
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        integers = torch.tensor((top_k, seed, position))
        self._floats[row] = to_device(floats, device)
        self._integers[row] = to_device(integers, device)

    def advance(self, rows: Tensor) -> None:
        """Count one token for each of `rows` (rows,) int64."""
        self.positions.index_add_(0, rows, torch.ones_like(rows))
