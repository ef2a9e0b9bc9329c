"""A result's log probabilities as outputs have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pagestream_engine.plan import StepLogprobs, StepPromptLogprobs
from pagestream_engine.request import LogprobRow


class PromptRows(NamedTuple):
    """What a chunk reports of its prompt."""

    scheduled: int
    """Index of its row in the step."""
    position: int
    """Place in the prompt of the first token that is reported."""
    rows: list[LogprobRow]


def prompt_logprob_rows(given: StepPromptLogprobs) -> Iterator[PromptRows]:
    """Yield the rows of each chunk that reports some."""
    token_ids, logprobs, ranks = given.token_ids.tolist(), given.logprobs.tolist(), given.ranks.tolist()
    first = 0
    columns = (given.scheduled, given.positions, given.num_tokens, given.counts)
    for scheduled, position, num_tokens, count in zip(*(each.tolist() for each in columns), strict=True):
        places = range(first, first + num_tokens)
        width = count + 1
        rows = [LogprobRow(token_ids[place][:width], logprobs[place][:width], ranks[place]) for place in places]
        yield PromptRows(scheduled, position, rows)
        first += num_tokens


def logprob_rows(given: StepLogprobs | None) -> dict[int, list[LogprobRow]]:
    """Return the rows of each sample that asked for them, one for each of its tokens, by its index.

    Args:
        given: the step's; None where no sample asked for any.
    """
    rows: dict[int, list[LogprobRow]] = {}
    if given is None:
        return rows
    columns = (given.samples, given.counts, given.token_ids, given.logprobs, given.ranks)
    for sample, count, token_ids, logprobs, rank in zip(*(each.tolist() for each in columns), strict=True):
        row = LogprobRow(token_ids[: count + 1], logprobs[: count + 1], rank)
        rows.setdefault(sample, []).append(row)
    return rows
