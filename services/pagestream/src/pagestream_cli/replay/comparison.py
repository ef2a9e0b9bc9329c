"""Comparison of an answer with the one that was generated again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_cli.replay.answers import Answer


@dataclass(frozen=True)
class Difference:
    """The first place where a choice differs."""

    choice: int
    what: str
    """"token 17" (counted from 0), "text", "finish reason", ..."""
    recorded: str
    again: str

    def __str__(self) -> str:
        return f"choice {self.choice}, {self.what}: recorded {self.recorded}, generated again {self.again}"


def first_difference(recorded: Sequence[Answer], again: Sequence[Answer]) -> Difference | None:
    """Return the first difference of the first choice that has one; None where all are equal.

    A recorded choice that was cut short is compared up to its end.
    """
    for number, (before, after) in enumerate(zip(recorded, again, strict=True)):
        difference = _difference(number, before, after)
        if difference is not None:
            return difference
    return None


def largest_gap(recorded: Sequence[Answer], again: Sequence[Answer]) -> float | None:
    """Return the largest difference between log probabilities of chosen tokens; None where none were requested."""
    gaps = [
        abs(first - second)
        for before, after in zip(recorded, again, strict=True)
        for first, second in zip(before.logprobs, after.logprobs, strict=False)
    ]
    return max(gaps, default=None)


def _difference(number: int, before: Answer, after: Answer) -> Difference | None:
    for place, token in enumerate(before.token_ids):
        other = after.token_ids[place] if place < len(after.token_ids) else None
        if other != token:
            return Difference(number, f"token {place}", str(token), "its end" if other is None else str(other))
    if before.is_cut_short:
        return None  # text may have been held back at the cut
    if len(after.token_ids) > len(before.token_ids):
        place = len(before.token_ids)
        return Difference(number, f"token {place}", "its end", str(after.token_ids[place]))
    for what, first, second in (
        ("text", before.text, after.text),
        ("finish reason", before.finish_reason, after.finish_reason),
        ("stop reason", before.stop_reason, after.stop_reason),
    ):
        if first != second:
            return Difference(number, what, repr(first), repr(second))
    return None
