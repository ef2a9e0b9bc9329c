"""Repetition, frequency and presence penalties, by counts of each row's tokens that are kept on the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream_engine.sampler.stages.slots import grown
from pagestream_engine.sampler.stages.stage import LogitsStage, NewRow, StageRows
from pagestream_engine.transfers import to_device


class Penalties(LogitsStage):
    """Lowers (or raises) the logits of tokens that the row has.

    As vLLM: repetition penalty (Keskar et al. 2019, arXiv:1909.05858) on every token of prompt and output; frequency
    and presence penalty on the output's.

    A slot holds the row's different tokens and how often each is in the output, in order of appearance, beyond which
    its entries mean nothing: memory and time grow with the tokens of a row, not with the vocabulary.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._token_ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self._lengths = torch.zeros(0, dtype=torch.int64, device=device)
        """Different tokens of each slot."""
        self._factors = torch.zeros(0, 3, dtype=torch.float32, device=device)
        """Repetition, frequency and presence penalty."""
        self._most = np.zeros(0, dtype=np.int64)
        """By slot: no less than its length, as far as the host knows without reading it."""

    def _is_used_by(self, new: NewRow) -> bool:
        return new.params.has_penalties

    def _fill(self, slot: int, new: NewRow) -> None:
        token_ids, counts = _counted(new)
        length = len(token_ids)
        self._reserve(slot + 1, length + 1)
        params = new.params
        factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._token_ids[slot, :length] = to_device(torch.from_numpy(token_ids), self._device)
        self._counts[slot, :length] = to_device(torch.from_numpy(counts), self._device)
        self._factors[slot] = to_device(torch.tensor(factors), self._device)
        self._lengths[slot].fill_(length)
        self._most[slot] = length

    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Apply the three penalties, in this order."""
        width = self._width(rows)
        if width == 0:
            return
        token_ids, counts, is_entry = self._entries(rows, width)
        repetition, frequency, presence = self._factors[rows.slots].unsqueeze(-1).unbind(1)
        places = rows.copies[:, None], token_ids
        logits_before = logits[places]
        values = torch.where(logits_before > 0, logits_before / repetition, logits_before * repetition)
        values -= frequency * counts
        values -= presence * (counts > 0)
        logits[places] = torch.where(is_entry, values, logits_before)

    def advance(self, token_ids: Tensor, rows: StageRows) -> None:
        """Count the sampled tokens."""
        width = self._width(rows)
        self._reserve(len(self.slots), width + 1)
        lengths = self._lengths[rows.slots]
        is_entry = torch.arange(width, device=self._device) < lengths[:, None]
        found = (self._token_ids[rows.slots, :width] == token_ids[:, None]) & is_entry
        is_known = found.any(dim=-1)
        entry = torch.where(is_known, found.view(torch.uint8).argmax(dim=-1), lengths) if width else lengths
        self._counts[rows.slots, entry] = torch.where(is_known, self._counts[rows.slots, entry], 0.0) + 1.0
        self._token_ids[rows.slots, entry] = token_ids
        self._lengths[rows.slots] = lengths + ~is_known
        self._most[rows.host_slots] += 1

    def _entries(self, rows: StageRows, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids and counts, (rows, width), padded by the last entry of each row, and (rows, width or 1) whether an
        entry means something: the padding of a row that has no token at all does not."""
        lengths = self._lengths[rows.slots][:, None]
        index = torch.arange(width, device=self._device).minimum((lengths - 1).clamp_(min=0))
        token_ids = self._token_ids[rows.slots[:, None], index]
        return token_ids, self._counts[rows.slots[:, None], index], lengths > 0

    def _width(self, rows: StageRows) -> int:
        """Entries that hold the tokens of all rows. A CPU reads the lengths: the host's bound also counts repeats."""
        if self._device.type == "cpu":
            self._most[rows.host_slots] = self._lengths[rows.slots].numpy()
        return int(self._most[rows.host_slots].max())

    def _reserve(self, num_slots: int, width: int) -> None:
        self._token_ids = grown(self._token_ids, num_slots, width)
        self._counts = grown(self._counts, num_slots, width)
        self._lengths = grown(self._lengths, num_slots)
        self._factors = grown(self._factors, num_slots, 3)
        if num_slots > len(self._most):
            self._most = np.pad(self._most, (0, num_slots - len(self._most)))


def _counted(new: NewRow) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A row's different tokens, and how often each is in its output. Only the repetition penalty needs the prompt's."""
    outputs, counts = np.unique(np.asarray(new.output_token_ids, dtype=np.int64), return_counts=True)
    if new.params.repetition_penalty == 1.0:
        return outputs, counts.astype(np.float32)
    prompt = np.setdiff1d(np.asarray(new.prompt_token_ids, dtype=np.int64), outputs)
    return np.concatenate((outputs, prompt)), np.concatenate((counts, np.zeros(len(prompt)))).astype(np.float32)
