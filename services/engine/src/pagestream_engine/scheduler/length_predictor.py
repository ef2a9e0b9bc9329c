"""How many tokens a request will generate, by those that have ended."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import log2
from typing import Any, NamedTuple

from pagestream_engine.request import TokenSequence

OCTAVE_PARTS = 4
"""Prompts whose lengths lie within this part of an octave are alike. Mean absolute error on the conversations of the
Azure trace of 2023: whole octaves 67 tokens, halves 55, quarters 46, eighths 45."""
PRIOR = 8
"""Requests that it takes until those that are most alike weigh as much as all others."""
_Key = tuple[int | str, ...]
"""Of a median: () of all requests, then the part of an octave of the prompt's length, the tenant, and the power of two
of what the answer may have at most."""
MEMORY = 200
"""Requests that a median is of, about."""
MOST_MEDIANS = 4096
"""Of tenants and lengths; beyond, the one that was needed least recently goes."""
LEAST_SCALE = 8.0
"""Tokens that a median moves by at least, times the weight of a request."""


class _Median:
    """A running median: it moves a part of itself towards each value, a smaller one the more values it knows."""

    __slots__ = ("num_values", "value")

    def __init__(self) -> None:
        self.num_values = 0
        self.value = 0.0

    def note(self, value: float) -> None:
        self.num_values = min(self.num_values + 1, MEMORY)
        if self.num_values == 1:
            self.value = value
            return
        step = max(self.value, LEAST_SCALE) / self.num_values
        self.value += min(step, max(-step, value - self.value))


class RequestShape(NamedTuple):
    """What is known of a request's length before it runs."""

    num_prompt_tokens: int
    tenant: str
    most_output_tokens: int


class LengthPredictor:
    """Medians of output lengths, of ever more similar requests: all, prompts about as long, the tenant's among these,
    and those with a similar `max_tokens`. Each is blended with the one before by how many requests it knows."""

    def __init__(self) -> None:
        self._medians: dict[_Key, _Median] = {}

    def expected(self, seq: TokenSequence) -> float:
        """Return the output tokens to expect of a sequence, at most what it may have."""
        return self.expected_of(_shape(seq))

    def expected_of(self, shape: RequestShape) -> float:
        """Return the output tokens to expect of a request, at most what it may have."""
        most = shape.most_output_tokens
        found = float(most)
        weight = 0  # `max_tokens` counts only until something is known
        for key in _keys(shape):
            median = self._medians.get(key)
            if median is not None:
                found = (found * weight + median.value * median.num_values) / (weight + median.num_values)
            weight = PRIOR
        return min(found, float(most))

    def note(self, seq: TokenSequence) -> None:
        """Learn from a sequence that is complete."""
        self.note_length(_shape(seq), seq.num_output_tokens)

    def note_length(self, shape: RequestShape, num_output_tokens: int) -> None:
        """Learn from a request that is complete."""
        for key in _keys(shape):
            median = self._medians.pop(key, None) or _Median()
            median.note(num_output_tokens)
            self._medians[key] = median
        while len(self._medians) > MOST_MEDIANS:
            del self._medians[next(iter(self._medians))]

    def table(self, most_rows: int) -> dict[str, Any]:
        """Return the medians that were needed last, for others to expect by: a JSON document.

        "rows" has [part of the octave of the prompt's length or None for any, tenant or None, median, requests], at
        most `most_rows`; "octave_parts" and "prior" are the constants here.
        """
        rows = [
            [*key, *(None,) * (2 - len(key)), round(median.value), median.num_values]
            for key, median in islice(reversed(self._medians.items()), 2 * most_rows)
            if len(key) <= 2
        ]
        return {"octave_parts": OCTAVE_PARTS, "prior": PRIOR, "rows": rows[:most_rows]}


def _shape(seq: TokenSequence) -> RequestShape:
    return RequestShape(seq.num_prompt_tokens, seq.tenant, seq.most_total_tokens - seq.num_prompt_tokens)


def _keys(shape: RequestShape) -> Iterator[_Key]:
    length = int(OCTAVE_PARTS * log2(shape.num_prompt_tokens))
    yield ()
    yield (length,)
    yield length, shape.tenant
    yield length, shape.tenant, shape.most_output_tokens.bit_length()
