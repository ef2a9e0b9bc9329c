"""What the scheduler decided for one step; `PlanBuilder` turns it into the record that is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagestream_engine.cache.copies import BlockCopy
from pagestream_engine.cache.host_tier import PageCopy
from pagestream_engine.request import TokenSequence


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step: the next `num_scheduled_tokens` of its unsent tokens.

    Its block tables cover these tokens.
    """

    seq: TokenSequence
    num_scheduled_tokens: int
    """Tokens that this step computes. Of a decode: its last token, then drafts of those after it."""
    needs_sample: bool
    """Whether these tokens reach the end of `token_ids`, so that the next token can be sampled."""
    siblings: Sequence[TokenSequence] = ()
    """Sequences with equal tokens, which sample from the same logits, each with noise of its own."""


@dataclass(slots=True)
class ScheduledStep:
    """One step."""

    prefills: list[ScheduledSequence] = field(default_factory=list)
    """Chunks of prompts and of recomputed sequences."""
    decodes: list[ScheduledSequence] = field(default_factory=list)
    """One new token each, and drafts; all need a sample."""
    has_drafts: bool = False
    """Whether some decode computes drafts."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Done before anything is computed, all sources being read before any target is written."""

    saves: list[PageCopy] = field(default_factory=list)
    """Blocks that are copied to host memory beside the computation, which does not write them."""
    loads: list[PageCopy] = field(default_factory=list)
    """Blocks that are copied from host memory beside the computation, which does not read them."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.prefills and not self.decodes and not self.loads

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        num_decoded = (
            sum(entry.num_scheduled_tokens for entry in self.decodes) if self.has_drafts else len(self.decodes)
        )
        return num_decoded + sum(chunk.num_scheduled_tokens for chunk in self.prefills)

    @property
    def ends_prompts(self) -> bool:
        """Whether some sequence ends when this step has computed its prompt."""
        return any(chunk.needs_sample and chunk.seq.ends_with_prompt for chunk in self.prefills)

    def sampled(self) -> list[TokenSequence]:
        """The sequences that get a token, in the order of the runner's answer: prefills, then decodes."""
        first = [seq for chunk in self.prefills if chunk.needs_sample for seq in (chunk.seq, *chunk.siblings)]
        return first + [entry.seq for entry in self.decodes]
