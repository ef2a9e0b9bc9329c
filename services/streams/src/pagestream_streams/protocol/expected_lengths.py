"""How many tokens answers are expected to have, by what engines publish of those that ended (docs/decisions/0206)."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from math import log2
from typing import NamedTuple

_log = logging.getLogger(__name__)

_Key = tuple[int | None, str | None]
"""Part of the octave of the prompt's length, and tenant; None for any."""


_MOST = 2**40
"""Greatest number of a table that is believed; sums of products stay finite."""


@dataclass
class _Medians:
    octave_parts: int = 1
    prior: int = 1
    sums: defaultdict[_Key, float] = field(default_factory=lambda: defaultdict(float))
    """Of the engines' medians, each times its requests."""
    counts: defaultdict[_Key, int] = field(default_factory=lambda: defaultdict(int))


class _Table(NamedTuple):
    octave_parts: int
    prior: int
    rows: list[tuple[_Key, float, int]]
    """Median in tokens, and the number of requests that it is of."""

    @classmethod
    def parse(cls, text: bytes) -> _Table:
        """Read what `LengthPredictor.table` wrote. ValueError, TypeError, KeyError, OverflowError or RecursionError."""
        document = json.loads(text)
        rows: list[tuple[_Key, float, int]] = []
        for length, tenant, median, count in document["rows"]:
            if not (length is None or isinstance(length, int)) or not (tenant is None or isinstance(tenant, str)):
                raise TypeError(f"expected a length and a tenant, got {length!r} and {tenant!r}")
            rows.append(((length, tenant), _within(float(median), 0, _MOST), int(_within(count, 1, _MOST))))
        octave_parts, prior = (int(_within(document[name], 1, _MOST)) for name in ("octave_parts", "prior"))
        return cls(octave_parts, prior, rows)


def _within(value: float, least: int, most: int) -> float:
    if not least <= value <= most:  # nor is NaN
        raise ValueError(f"expected a number from {least} to {most}, got {value}")
    return value


class ExpectedLengths:
    """Expectations of one process, of models by name. Where nothing is known of a model they are 0."""

    def __init__(self) -> None:
        """Create it without knowledge."""
        self._models: dict[str, _Medians] = {}

    def note(self, model: str, tables: Collection[bytes]) -> None:
        """Take what a model's living engines have published (`LengthPredictor.table`) in place of what was known.

        Without any table what is known stays: the last engine may have gone.
        """
        medians = _Medians()
        for text in tables:
            try:
                table = _Table.parse(text)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                _log.debug("an engine of %s publishes lengths that can't be read: %s", model, error)
                continue
            medians.octave_parts, medians.prior = table.octave_parts, table.prior
            for key, median, count in table.rows:
                medians.sums[key] += median * count
                medians.counts[key] += count
        if medians.counts:
            self._models[model] = medians

    def expected(self, model: str, num_prompt_tokens: int, tenant: str, most: int) -> int:
        """Return the output tokens to expect of a request, at most `most`.

        Medians of ever more similar requests, each blended with the one before by how many requests it knows, as in
        `LengthPredictor`.
        """
        medians = self._models.get(model)
        if medians is None or num_prompt_tokens < 1:
            return 0
        length = int(medians.octave_parts * log2(num_prompt_tokens))
        found, weight = 0.0, 0
        for key in ((None, None), (length, None), (length, tenant)):
            count = medians.counts.get(key, 0)
            if count:
                found = (found * weight + medians.sums[key]) / (weight + count)
            weight = medians.prior
        return min(round(found), most)
