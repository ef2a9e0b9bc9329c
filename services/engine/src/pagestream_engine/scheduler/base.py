"""What a step is: the border between the scheduler and the runner."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from pagestream_engine.cache.copies import BlockCopy
from pagestream_engine.request.sequence import Sequence


class RankedToken(NamedTuple):
    """A token and its place in a distribution."""

    token_id: int
    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """From 1; of equally likely tokens the lowest id comes first."""


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step: `token_ids[num_computed_tokens : num_computed_tokens + num_new_tokens]`.

    Its block table already covers these tokens.
    """

    seq: Sequence
    num_new_tokens: int
    needs_sample: bool
    """Whether the new tokens reach the end of `token_ids`, so that the next token can be sampled."""
    siblings: Items[Sequence] = ()
    """Sequences with equal tokens, which sample from the same logits, each with noise of its own."""


@dataclass(slots=True)
class ScheduledStep:
    """One step. It is the scheduler's own and valid until its next `schedule`."""

    prefills: list[ScheduledSequence] = field(default_factory=list)
    """Chunks of prompts and of recomputed sequences."""
    decodes: list[ScheduledSequence] = field(default_factory=list)
    """One new token each; all need a sample."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Done before anything is computed, all sources being read before any target is written."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.prefills and not self.decodes

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes) + sum(chunk.num_new_tokens for chunk in self.prefills)

    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the runner's answer: prefills, then decodes."""
        first = [seq for chunk in self.prefills if chunk.needs_sample for seq in (chunk.seq, *chunk.siblings)]
        return first + [entry.seq for entry in self.decodes]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step gave, in the order of `ScheduledStep.sampled`."""

    token_ids: list[int]
    logprobs: Mapping[int, Items[RankedToken]] = field(default_factory=dict)
    """For each place in `token_ids` whose sequence asked for it: the chosen token, then the likeliest ones."""
