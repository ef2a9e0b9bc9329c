"""Drafts of a step's rows, and what speculation asks of a source of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from pagestream_engine.plan import Int32Array, Int64Array, NewSequence, StepPlan

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafts of the decodes of a plan, whose `num_new_tokens` count them."""

    token_ids: Int32Array
    """(decodes, most) of each decode the tokens after its last one, then `NO_TOKEN`."""

    @property
    def counts(self) -> Int64Array:
        """(decodes,): how many each has."""
        counts: Int64Array = (self.token_ids != NO_TOKEN).sum(1)
        return counts

    def packed(self) -> Int32Array:
        """(drafts,): all of them, decode by decode."""
        drafts: Int32Array = self.token_ids[self.token_ids != NO_TOKEN]
        return drafts


def has_room(plan: StepPlan) -> bool:
    """Return whether some decode of a plan may have drafts."""
    return bool((plan.num_new_tokens[plan.num_prefills :] > 1).any())


def with_drafts(plan: StepPlan, token_ids: Int32Array) -> tuple[StepPlan, Drafts | None]:
    """Return a plan whose decodes compute so many tokens as they have drafts, as in `Drafts`, and one more."""
    drafts = Drafts(token_ids)
    num_new_tokens = plan.num_new_tokens.copy()
    num_new_tokens[plan.num_prefills :] = 1 + drafts.counts
    plan = replace(plan, num_new_tokens=num_new_tokens)
    return plan, drafts if (token_ids != NO_TOKEN).any() else None


class RowCount(NamedTuple):
    """A row of the batch, and how many tokens: of its next prefill chunk, or drafts that are wanted."""

    row: int
    num_tokens: int


class Proposer(Protocol):
    """Knows the tokens of each row, and drafts those that follow."""

    def start(self, new: NewSequence) -> None:
        """Take a sequence with the tokens that it has."""
        ...

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Append what was sampled."""
        ...

    def propose(self, chunks: Sequence[RowCount], wanted: Sequence[RowCount]) -> Sequence[Sequence[int]]:
        """Return for each row of `wanted` at most as many tokens that may come next, or none.

        Args:
            chunks: what the step computes of prompts.
            wanted: rows that decode, each with at least one draft.
        """
        ...


class NoProposer:
    """Proposes nothing: drafts follow from grammars alone."""

    def start(self, new: NewSequence) -> None:
        """Keep nothing."""

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Keep nothing."""

    def propose(self, chunks: Sequence[RowCount], wanted: Sequence[RowCount]) -> Sequence[Sequence[int]]:
        """Return no drafts."""
        return [()] * len(wanted)
