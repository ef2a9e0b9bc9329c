"""Bad words: the last token of a sequence of tokens is banned where the output ends with those before it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.sampler.stages.slots import grown
from pagestream_engine.sampler.stages.stage import LogitsStage, NewRow, StageRows
from pagestream_engine.transfers import to_device

_ANY = -1
"""In a word's prefix: no token is asked for at this place."""
_NO_TOKEN = -2
"""In an output's tail: there was no token yet."""


class BadWords(LogitsStage):
    """Bans what would complete one of `bad_words_token_ids`, as vLLM: within the output alone."""

    bans_by = "bad_words"

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._clear()

    def remove(self, row: int) -> None:
        """Forget a row; the tables, which are as wide as the longest words were, are dropped with the last one."""
        super().remove(row)
        if not self.slots.num_taken:
            self._clear()

    def _clear(self) -> None:
        device = self._device
        self._prefixes = torch.zeros(0, 0, 0, dtype=torch.int64, device=device)
        """(slots, words, tokens before a word's last one), aligned to the right."""
        self._last = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._tails = torch.zeros(0, 0, dtype=torch.int64, device=device)
        """(slots, longest prefix): the last tokens of each output, the newest at the right."""
        self._is_word = torch.zeros(0, 0, dtype=torch.bool, device=device)
        """(slots, words): whether there is a word at this place."""

    def _is_used_by(self, new: NewRow) -> bool:
        return bool(new.params.bad_words_token_ids)

    def _fill(self, slot: int, new: NewRow) -> None:
        words = new.params.bad_words_token_ids
        self._reserve(slot + 1, len(words), max(len(word) for word in words) - 1)
        longest = self._tails.shape[1]
        prefixes = np.full(self._prefixes.shape[1:], _ANY, dtype=np.int64)
        last = np.zeros(self._last.shape[1], dtype=np.int64)
        for index, word in enumerate(words):
            prefixes[index, longest - (len(word) - 1) :] = word[:-1]
            last[index] = word[-1]
        tail = np.full(longest, _NO_TOKEN, dtype=np.int64)
        outputs = np.asarray(new.output_token_ids[-longest:] if longest else (), dtype=np.int64)
        tail[longest - len(outputs) :] = outputs
        is_word = np.arange(len(last)) < len(words)
        tables = (self._prefixes, self._last, self._tails, self._is_word)
        for table, entries in zip(tables, (prefixes, last, tail, is_word), strict=True):
            table[slot] = to_device(torch.from_numpy(entries), self._device)

    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Set the last token of each word whose others stand at the output's end to -inf."""
        prefixes, tails = self._prefixes[rows.slots], self._tails[rows.slots][:, None]
        completes = ((prefixes == tails) | (prefixes == _ANY)).all(dim=-1) & self._is_word[rows.slots]
        # Words may have one last token in common: the lowest ceiling holds.
        ceilings = torch.where(completes, -torch.inf, torch.inf)
        places = rows.copies[:, None] * self._vocab_size + self._last[rows.slots]
        logits.view(-1).scatter_reduce_(0, places.flatten(), ceilings.flatten(), "amin")

    def advance(self, token_ids: Tensor, rows: StageRows) -> None:
        """Shift the sampled tokens into the tails."""
        if self._tails.shape[1]:
            self._tails[rows.slots] = torch.cat((self._tails[rows.slots, 1:], token_ids[:, None]), dim=-1)

    def _reserve(self, num_slots: int, num_words: int, longest: int) -> None:
        """Make room. Longer prefixes and tails move to the right, where the newest tokens stand."""
        shift = longest - self._tails.shape[1]
        if shift > 0:
            self._prefixes = torch.nn.functional.pad(self._prefixes, (shift, 0), value=_ANY)
            self._tails = torch.nn.functional.pad(self._tails, (shift, 0), value=_NO_TOKEN)
        self._tails = grown(self._tails, num_slots, self._tails.shape[1])
        self._prefixes = grown(self._prefixes, num_slots, num_words, self._tails.shape[1])
        self._last = grown(self._last, *self._prefixes.shape[:2])
        self._is_word = grown(self._is_word, *self._prefixes.shape[:2])
