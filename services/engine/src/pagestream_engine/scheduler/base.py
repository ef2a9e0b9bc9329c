"""What a step is: the border between the scheduler and the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagestream_engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step: `token_ids[num_computed_tokens : num_computed_tokens + num_new_tokens]`.

    Its block table already covers these tokens.
    """

    seq: Sequence
    num_new_tokens: int
    needs_sample: bool
    """Whether the new tokens reach the end of `token_ids`, so that the next token can be sampled."""


@dataclass(slots=True)
class ScheduledStep:
    """One step. It is the scheduler's own and valid until its next `schedule`."""

    prefills: list[ScheduledSequence] = field(default_factory=list)
    """Chunks of prompts and of recomputed sequences."""
    decodes: list[ScheduledSequence] = field(default_factory=list)
    """One new token each; all need a sample."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.prefills and not self.decodes

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes) + sum(chunk.num_new_tokens for chunk in self.prefills)
