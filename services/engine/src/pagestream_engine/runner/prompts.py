"""What is wanted of prompts beside a step's samples: log probabilities of their tokens, or a vector (`PromptWork`).

A step none of whose rows wants any doesn't enter this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.features.pooling import PooledPart, PooledRows, PooledStates
from pagestream_engine.models.model import Model
from pagestream_engine.plan import Int32Array, Int64Array, NewSequence, StepPlan
from pagestream_engine.runner.batch import sample_places
from pagestream_engine.sampler.logprobs import RankedTokens, prompt_logprobs
from pagestream_engine.transfers import to_device

MAX_PIECE_BYTES = 128 << 20
"""Bound of the temporaries of one piece: 16 rows of a vocabulary of 131,072."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The prompt tokens of a step whose following token's log probability is wanted."""

    places: Int64Array
    """(tokens,): packed tokens that report, ascending."""
    next_token_ids: Tensor
    """(tokens,) int64: the prompt's token after each."""
    chunks: Int32Array
    """(chunks, 4): of each chunk its index in the step, the place of its first reported token in the prompt, how many
    it reports, and how many of the likeliest it asked for."""

    def ranked(
        self, hidden: Tensor, reporting: Tensor, logits_of: Callable[[Tensor], Tensor], vocab_size: int
    ) -> RankedTokens:
        """Return the log probabilities, made in pieces.

        Args:
            hidden: (wanted, hidden_size): what the model gave for the tokens that the step wants.
            reporting: (tokens,) int64: which rows of it are those of `places`.
            logits_of: makes logits of such rows.
        """
        return prompt_logprobs(
            reporting,
            self.next_token_ids,
            int(self.chunks[:, 3].max()),
            lambda rows: logits_of(hidden[rows]),
            vocab_size=vocab_size,
            max_bytes=MAX_PIECE_BYTES,
        )


class PromptRows:
    """Rows of the batch that have prompt tokens to report."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, tuple[NewSequence, int]] = {}
        """With the next token that each computes."""

    def add(self, new: NewSequence) -> None:
        """Take a row that asked for log probabilities of its prompt."""
        if new.num_computed_tokens < new.num_prompt_tokens - 1:
            self._rows[new.row] = new, new.num_computed_tokens

    def remove(self, row: int) -> None:
        """Forget a row, if it is one of them."""
        self._rows.pop(row, None)

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
        return PromptPart(
            places=np.concatenate(places),
            next_token_ids=_to_device(np.concatenate(targets), self._device),
            chunks=np.array(chunks, np.int32),
        )

    def _num_likeliest(self, new: NewSequence) -> int:
        given = new.num_prompt_logprobs or 0
        return self._vocab_size if given < 0 else min(given, self._vocab_size)


class PromptWork:
    """Rows of the batch of whose prompts something is wanted beside the samples: log probabilities, or a vector.

    Where `rows` is empty no step enters it.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self.rows: set[int] = set()
        """Until they are removed."""
        self._model = model
        self._device = device
        self._reporting = PromptRows(model.info.vocab_size, device)
        self._pooled = PooledRows()

    def edit(self, plan: StepPlan) -> None:
        """Forget the rows that a plan removes, and take those that it adds of which something is wanted."""
        for row in self.rows.intersection(plan.removed.tolist()):
            self.rows.remove(row)
            self._reporting.remove(row)
            self._pooled.remove(row)
        for new in plan.added:
            if new.num_prompt_logprobs is not None:
                self.rows.add(new.row)
                self._reporting.add(new)
            if new.params.pooling is not None:
                self.rows.add(new.row)
                self._pooled.add(new)

    def take(self, plan: StepPlan) -> WantedTokens | None:
        """Return the tokens that a plan wants, where it wants more than its samples; count its tokens as computed."""
        prompts, pooled = self._reporting.take(plan), self._pooled.take(plan)
        if prompts is None and pooled is None:
            return None
        return WantedTokens(plan, self._device, prompts, pooled)

    def report(self, tokens: WantedTokens, hidden: Tensor) -> Reported:
        """Return what a step has of prompts.

        Args:
            hidden: (wanted, hidden_size): what the model gave for them.
        """
        logprobs = states = None
        if tokens.prompts is not None:
            ranked = tokens.prompts.ranked(
                hidden, tokens.rows_of(tokens.prompts.places), self._model.logits, self._model.info.vocab_size
            )
            logprobs = ReportedPrompts(tokens.prompts.chunks, ranked)
        if tokens.pooled is not None:
            rows = tokens.rows_of(tokens.pooled.places)
            states = self._pooled.pool(tokens.pooled, self._model.states(hidden[rows]))
        return Reported(logprobs, states)


class WantedTokens:
    """The packed tokens of a step whose result is wanted: for its samples, and for what it has of prompts.

    Args:
        prompts: whose log probabilities are wanted, if any.
        pooled: whose hidden states are, if any.
    """

    def __init__(
        self, plan: StepPlan, device: torch.device, prompts: PromptPart | None, pooled: PooledPart | None
    ) -> None:
        self.prompts = prompts
        self.pooled = pooled
        of_prompts = [part.places for part in (prompts, pooled) if part is not None]
        sampling, _ = sample_places(plan, plan.num_new_tokens.cumsum())
        self._wanted = np.unique(np.concatenate((sampling, *of_prompts)))
        self._device = device
        self.places = _to_device(self._wanted, device)
        """(wanted,) int64, ascending."""
        self.sampling = self.rows_of(sampling)
        """(samples' logits rows,) int64: which of them sample."""

    def rows_of(self, places: Int64Array) -> Tensor:
        """Return which of the wanted tokens are these: (tokens,) int64."""
        return _to_device(np.searchsorted(self._wanted, places), self._device)


def _to_device(numbers: Int32Array | Int64Array, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(numbers).to(torch.int64), device)


class ReportedPrompts(NamedTuple):
    """Log probabilities of prompt tokens, on the device of the logits."""

    chunks: Int32Array
    """As `PromptPart.chunks`."""
    ranked: RankedTokens
    """Of all chunks' tokens."""


class Reported(NamedTuple):
    """What a step has of prompts."""

    logprobs: ReportedPrompts | None = None
    pooled: PooledStates | None = None

    def tensors(self) -> list[Tensor]:
        """Return what is on the device."""
        ranked = [] if self.logprobs is None else [*self.logprobs.ranked]
        return ranked if self.pooled is None else [*ranked, self.pooled.states]

    def on_host(self, tensors: Iterator[Tensor]) -> Reported:
        """Return the same with copies of its tensors, taken from an iterator."""
        logprobs, pooled = self
        if logprobs is not None:
            logprobs = ReportedPrompts(logprobs.chunks, RankedTokens(next(tensors), next(tensors), next(tensors)))
        if pooled is not None:
            pooled = PooledStates(pooled.samples, next(tensors))
        return Reported(logprobs, pooled)
