"""Minimum length: no token that would end the output is chosen before `min_tokens`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.sampler.stages.stage import LogitsStage, NewRow, StageRows
from pagestream_engine.sampler.stages.token_table import TokenTable


class MinTokens(LogitsStage):
    """Bans a row's end tokens until it has `min_tokens`; then the row leaves the stage.

    The host counts along: a row gets one token each time that it is sampled.
    """

    bans_by = "min_tokens"

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._ends = TokenTable(device)
        self._num_left = np.zeros(0, dtype=np.int64)
        """By slot: tokens that the row lacks."""

    def _is_used_by(self, new: NewRow) -> bool:
        if new.params.structured_outputs is not None:
            return False  # Its grammar's mask does it, as far as the grammar allows another token.
        return len(new.output_token_ids) < new.params.min_tokens and bool(self._bannable(new))

    def _fill(self, slot: int, new: NewRow) -> None:
        self._ends.write(slot, self._bannable(new))
        if slot >= len(self._num_left):
            self._num_left = np.pad(self._num_left, (0, slot + 1 - len(self._num_left)))
        self._num_left[slot] = new.params.min_tokens - len(new.output_token_ids)

    def _bannable(self, new: NewRow) -> list[int]:
        return sorted(token_id for token_id in new.end_token_ids if token_id < self._vocab_size)

    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Set the end tokens to -inf."""
        logits[rows.copies[:, None], self._ends.token_ids(rows)] = -torch.inf

    def advance(self, token_ids: Tensor, rows: StageRows) -> None:
        """Count one token for each row."""
        self._num_left[rows.host_slots] -= 1
        reached = rows.host_slots[self._num_left[rows.host_slots] <= 0]
        if len(reached):
            self.slots.free_slots(reached)
