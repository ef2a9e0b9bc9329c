"""Logit bias: a number added to the logits of chosen tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from pagestream_engine.sampler.stages.stage import LogitsStage, NewRow, StageRows
from pagestream_engine.sampler.stages.token_table import TokenTable


class LogitBias(LogitsStage):
    """Adds `logit_bias`."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._biases = TokenTable(device)

    def _is_used_by(self, new: NewRow) -> bool:
        return bool(new.params.logit_bias)

    def _fill(self, slot: int, new: NewRow) -> None:
        biases = new.params.logit_bias or {}
        self._biases.write(slot, list(biases), biases.values())

    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Add the bias of each row."""
        places = rows.copies[:, None], self._biases.token_ids(rows)
        logits[places] = logits[places] + self._biases.values(rows)
