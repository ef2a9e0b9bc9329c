"""What a step takes: a linear model of its seconds, fitted to the last steps."""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple, Self

from pagestream_engine.scheduler.scheduled_step import ScheduledStep

MEMORY = 0.98
"""Weight of a step relative to the one after it: what the last 50 or so have taken decides."""
SWEEPS = 4
"""Of the coefficients, at each step. They begin where the last step's ended, so that few suffice."""
MOST_EXCESS = 2
"""A step's time counts as at most so many times what was expected, so that one that was late by chance changes little;
a machine that got slower is believed within a few steps."""
NUM_TRUSTED = 8
"""Steps with prompts and decodes from which on an expectation is good enough for that."""


class StepWork(NamedTuple):
    """What a step's time depends on, linearly; of what explains it equally well, the first does."""

    constant: int
    """1: the step itself."""
    num_decodes: int
    num_tokens: int
    """Of chunks."""
    num_pairs: float
    """Of a chunk's tokens and the tokens that they attend to."""
    context: int
    """Tokens before each chunk: they are read once for it, whatever its size."""
    num_chunks: int
    """Of prompts."""

    @classmethod
    def of(cls, step: ScheduledStep) -> Self | None:
        """Return the work of a step that was just collected; None where one of its sequences has ended meanwhile."""
        num_tokens = context = 0
        num_pairs = 0.0
        for chunk in step.prefills:
            size = chunk.num_scheduled_tokens
            before = chunk.seq.num_computed_tokens - size
            if before < 0:
                return None
            num_tokens += size
            num_pairs += size * (before + size / 2)
            context += before
        return cls(1, len(step.decodes), num_tokens, num_pairs, context, len(step.prefills))


class StepTimes:
    """Expects what steps take, by least squares over the steps noted, the latest weighing most.

    No coefficient is negative: no work saves time. Coordinate descent keeps what the last steps do not tell apart (as
    context and chunk size, while each step is sized to take the same time) near what it was.
    """

    def __init__(self) -> None:
        size = len(StepWork._fields)
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._coefficients = [0.0] * size
        self._num_mixed = 0

    @property
    def knows_prompts(self) -> bool:
        """Whether a step with prompts and decodes was noted."""
        return self._num_mixed > 0

    def expected_s(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        return sum(map(float.__mul__, self._coefficients, map(float, work)))

    def num_tokens_in(self, seconds: float, context: int) -> float:
        """Return how many tokens of a chunk take so long, beyond what the chunk takes by itself."""
        if seconds <= 0.0:
            return 0.0
        of_token, of_pair = self._coefficients[2:4]
        linear = of_token + of_pair * context
        root = sqrt(linear * linear + 2 * of_pair * seconds)
        return 2 * seconds / (linear + root) if root else inf

    def note(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that has run."""
        if self._num_mixed >= NUM_TRUSTED:
            seconds = min(seconds, MOST_EXCESS * self.expected_s(work))
        self._num_mixed += work.num_chunks > 0
        for row, value, place in zip(self._products, work, range(len(work)), strict=True):
            for other, factor in enumerate(work):
                row[other] = MEMORY * row[other] + value * factor
            self._targets[place] = MEMORY * self._targets[place] + value * seconds
        for _ in range(SWEEPS):
            self._sweep()

    def _sweep(self) -> None:
        """Set each coefficient to the best one beside the others."""
        found = self._coefficients
        for place, row in enumerate(self._products):
            if row[place] > 0.0:
                rest = self._targets[place] - sum(map(float.__mul__, row, found))
                found[place] = max(0.0, found[place] + rest / row[place])
