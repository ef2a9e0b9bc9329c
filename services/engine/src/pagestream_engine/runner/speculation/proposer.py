"""What speculation asks of a source of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagestream_engine.plan import NewSequence


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
