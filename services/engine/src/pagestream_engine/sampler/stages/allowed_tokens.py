"""Allowed tokens: all others are banned."""

from __future__ import annotations

import torch
from torch import Tensor

from pagestream_engine.sampler.stages.stage import LogitsStage, NewRow, StageRows
from pagestream_engine.sampler.stages.token_table import TokenTable


class AllowedTokens(LogitsStage):
    """Bans every token that is not among `allowed_token_ids`."""

    bans_by = "allowed_token_ids"

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._allowed = TokenTable(device)

    def _is_used_by(self, new: NewRow) -> bool:
        return new.params.allowed_token_ids is not None

    def _fill(self, slot: int, new: NewRow) -> None:
        self._allowed.write(slot, list(dict.fromkeys(new.params.allowed_token_ids or ())))

    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Set what is not allowed to -inf."""
        places = rows.copies[:, None], self._allowed.token_ids(rows)
        kept = logits[places]
        logits.index_fill_(0, rows.copies, -torch.inf)
        logits[places] = kept
