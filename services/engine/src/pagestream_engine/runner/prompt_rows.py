"""Which rows report log probabilities of their prompt, and what of it a step has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.runner.persistent_batch import sample_places
from pagestream_engine.sampler.logprobs import RankedTokens
from pagestream_engine.sampler.prompt_logprobs import prompt_logprobs
from pagestream_engine.step.records import Int32Array, Int64Array, NewSequence, StepPlan
from pagestream_engine.transfers import to_device

MAX_PIECE_BYTES = 128 << 20
"""Bound of the temporaries of one piece: 16 rows of a vocabulary of 131,072."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The prompt tokens of a step whose following token's log probability is wanted."""

    wanted: Tensor
    """(wanted,) int64: packed tokens whose result is wanted, ascending: those that sample too."""
    sampling: Tensor
    """(samples' logits rows,) int64: which of `wanted` sample."""
    reporting: Tensor
    """(tokens,) int64: which of `wanted` report."""
    next_token_ids: Tensor
    """(tokens,) int64: the prompt's token after each."""
    chunks: Int32Array
    """(chunks, 4): of each chunk its index in the step, the place of its first reported token in the prompt, how many
    it reports, and how many of the likeliest it asked for."""

    def ranked(self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], vocab_size: int) -> RankedTokens:
        """Return the log probabilities, made in pieces from the wanted tokens' results."""
        return prompt_logprobs(
            self.reporting,
            self.next_token_ids,
            int(self.chunks[:, 3].max()),
            lambda rows: logits_of(hidden[rows]),
            vocab_size=vocab_size,
            max_bytes=MAX_PIECE_BYTES,
        )


class PromptRows:
    """Rows of the batch that have prompt tokens to report; empty, and without cost, where none asked."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, tuple[NewSequence, int]] = {}
        """With the next token that each computes."""

    def apply(self, plan: StepPlan) -> None:
        """Edit the rows that a plan removes and adds."""
        if self._rows:
            for row in plan.removed.tolist():
                self._rows.pop(row, None)
        for new in plan.added:
            if new.num_prompt_logprobs is not None and new.num_computed_tokens < new.num_prompt_tokens - 1:
                self._rows[new.row] = new, new.num_computed_tokens

    def take(self, plan: StepPlan) -> PromptPart | None:
        """Return what a plan that was applied has to report, and count its tokens as computed."""
        if not self._rows:
            return None
        places: list[Int64Array] = []
        targets: list[Int32Array] = []
        chunks: list[tuple[int, int, int, int]] = []
        first = 0
        counts = plan.num_new_tokens[: plan.num_prefills].tolist()
        for index, (row, count) in enumerate(zip(plan.rows.tolist(), counts, strict=False)):
            if row in self._rows:
                new, start = self._rows.pop(row)
                end = min(start + count, new.num_prompt_tokens - 1)
                places.append(np.arange(first, first + end - start))
                targets.append(new.token_ids[start + 1 : end + 1])
                chunks.append((index, start + 1, end - start, self._num_likeliest(new)))
                if end < new.num_prompt_tokens - 1:
                    self._rows[row] = new, end
            first += count
        if not chunks:
            return None
        reporting = np.concatenate(places)
        sampling, _ = sample_places(plan, plan.num_new_tokens.cumsum())
        wanted = np.union1d(reporting, sampling)
        return PromptPart(
            wanted=self._to_device(wanted),
            sampling=self._to_device(np.searchsorted(wanted, sampling)),
            reporting=self._to_device(np.searchsorted(wanted, reporting)),
            next_token_ids=self._to_device(np.concatenate(targets)),
            chunks=np.array(chunks, np.int32),
        )

    def _num_likeliest(self, new: NewSequence) -> int:
        given = new.num_prompt_logprobs or 0
        return self._vocab_size if given < 0 else min(given, self._vocab_size)

    def _to_device(self, numbers: Int32Array | Int64Array) -> Tensor:
        return to_device(torch.from_numpy(numbers).to(torch.int64), self._device)
