"""How many prompt tokens a step may have beside its decodes, where inter-token latency has a bound."""

from __future__ import annotations

from collections.abc import Mapping

from pagestream_engine.scheduler.scheduled_step import ScheduledStep

LEAST_TOKENS = 32
"""Prompts get so many tokens of a step whatever it costs: they must not starve behind decodes that take longer than the
bound by themselves."""
FIRST_TOKENS = 64
"""Of the first step with prompts and decodes, whose cost nobody knows."""
GROWTH = 2
"""A step has at most so many times the prompt tokens of the largest one that has kept the bound."""
LOOK_EVERY = 32
"""After so many steps in a row with prompts, one has none: it shows what the decodes take by now."""
RISE, FALL = 0.5, 0.125
"""Weights of a new measurement that is above or below what is expected: costs that rise, as those of attention do while
a long prompt is computed, are believed sooner."""


class PrefillBudget:
    """Sizes the chunks of prompts so that a step takes no longer than a bound, by the times of the steps before.

    A step with decodes is expected to take what steps with about as many decodes and no prompt have taken, and so much
    more for each prompt token as the last steps with both have. Nothing is assumed of the model or the machine, and a
    single late step changes little.

    Args:
        bound_s: of a step in which sequences decode, in seconds; None: no bound.
    """

    def __init__(self, bound_s: float | None) -> None:
        self._bound_s = bound_s
        self._decode_s: dict[int, float] = {}
        """Of steps with decodes alone, by the bits of their number: 1, 2 or 3, 4 to 7, ..."""
        self._token_s: float | None = None
        """Of a prompt token in a step with decodes."""
        self._num_mixed = 0
        """Steps with prompts and decodes since the last one with decodes alone."""
        self._kept = 0
        """Prompt tokens of the largest step that has kept the bound; less after one that has not."""

    def limit(self, num_decodes: int, budget: int) -> int:
        """Return how many prompt tokens a step with so many decodes may have, of `budget` at most."""
        if self._bound_s is None or not num_decodes:
            return budget
        if self._num_mixed >= LOOK_EVERY:
            return 0
        tokens = max(FIRST_TOKENS, GROWTH * self._kept)
        if self._token_s is not None:
            spare_s = self._bound_s - self._expected_decode_s(num_decodes)
            tokens = min(tokens, int(spare_s / self._token_s))
        return min(budget, max(LEAST_TOKENS, tokens))

    def note(self, step: ScheduledStep, seconds: float) -> None:
        """Learn from a step that has run."""
        if self._bound_s is None or not step.decodes:
            return
        num_decodes, num_tokens = len(step.decodes), sum(chunk.num_scheduled_tokens for chunk in step.prefills)
        if not num_tokens:
            bits = num_decodes.bit_length()
            self._decode_s[bits] = _moved(self._decode_s.get(bits, seconds), seconds)
            self._num_mixed = 0
            return
        self._num_mixed += 1
        token_s = max(0.0, seconds - self._expected_decode_s(num_decodes)) / num_tokens
        self._token_s = max(_moved(token_s if self._token_s is None else self._token_s, token_s), 1e-9)
        if seconds <= self._bound_s:
            self._kept = max(self._kept, num_tokens)
        elif num_tokens <= self._kept:
            self._kept = num_tokens // GROWTH

    def _expected_decode_s(self, num_decodes: int) -> float:
        return _nearest(self._decode_s, num_decodes.bit_length())


def _moved(expected: float, measured: float) -> float:
    return expected + (RISE if measured > expected else FALL) * (measured - expected)


def _nearest(values: Mapping[int, float], key: int) -> float:
    """The value of the nearest key, the greater of two that are equally near; 0 where there is none."""
    return values[min(values, key=lambda other: (abs(other - key), -other))] if values else 0.0
