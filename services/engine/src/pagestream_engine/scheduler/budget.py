"""How many prompt tokens a step may have beside its decodes.

Every running stream waits for all of a step, so prompts that get what decodes leave of `max_num_batched_tokens` stretch
inter-token latency. Two rules make chunks smaller:

* `spread_chunk` spreads the prompt tokens that wait over a few steps. It depends on what is queued alone.
* `PrefillBudget` keeps a bound in time (`itl_bound_ms`): a linear model of what steps take, fitted to the last ones,
  says how many tokens fit.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple, Self

from pagestream_engine.plan import ScheduledStep
from pagestream_engine.scheduler.admission import ChunkBudget

LEAST_SPREAD_CHUNK = 384
"""Prompt tokens of a step at least, where as many wait; less than twice as many are not parted. Smaller chunks cost
TTFT, as each step computes the decodes, too."""


def spread_chunk(num_waiting_tokens: int, num_steps: int) -> int:
    """Return the prompt tokens of a step beside decodes, where so many wait that are to be spread over `num_steps`.

    As each step's share is of what still waits then, a burst begins with large chunks, and where more prompts come than
    decodes leave time for, chunks grow until they are what comes in a step.
    """
    num_steps = min(num_steps, num_waiting_tokens // LEAST_SPREAD_CHUNK)
    return -(-num_waiting_tokens // num_steps) if num_steps > 1 else max(LEAST_SPREAD_CHUNK, num_waiting_tokens)


# A mixed step has prompts and decodes. The bound is on what it may take (`itl_bound_ms`); a probe is a mixed step that
# is kept small to learn from.
LEAST_SHARE = 0.25
"""A step's prompts get tokens worth so much of what it takes without them (decodes, and the context of the first
chunk), even over the bound. So prompts do not starve where the bound can't be kept, a fifth of the time is theirs, and
the bound is exceeded by no more than it has to be and a quarter."""
FIRST_TOKENS = 32
"""Of the first step with prompts and decodes, whose cost nobody knows."""
GROWTH = 2
"""A step has at most so many times the prompt tokens of the largest of the last ones: beyond, costs are not known."""
RECENT = 0.9
"""What the largest of them counts for with each step more: after a long prompt, whose chunks were small at its end, the
next one begins with small ones."""
LOOK_EVERY = 32
"""After so many steps in a row with prompts, one has none: it shows what the decodes take by now."""
PROBE_EVERY = 8
"""Of so many such steps one has half the prompt tokens that it might have: it tells what tokens cost from what a chunk
and its context cost by themselves."""


class TimedBudget(ChunkBudget):
    """Prompt tokens that one step may still have, by their number, and by their time beside decodes.

    Args:
        num_tokens: most of all chunks.
        times: what tokens take.
        decodes: the step without prompts.
        bound_s: what it may take.
        is_probe: whether its first chunk has half of what fits.
    """

    __slots__ = ("_bound_s", "_is_probe", "_taken", "_times")

    def __init__(
        self, num_tokens: int, times: StepTimes, decodes: StepWork, bound_s: float, *, is_probe: bool = False
    ) -> None:
        super().__init__(num_tokens)
        self._times = times
        self._taken = decodes
        self._bound_s = bound_s
        self._is_probe = is_probe

    def limit(self, context: int) -> int:
        """Return the most tokens of a chunk with so many tokens before it; 0: none fits any more."""
        if not self.num_tokens:
            return 0
        fixed_s = self._times.expected_s(self._with_chunk(context, 0))
        spare_s = self._bound_s - fixed_s
        if self._taken.num_chunks:
            return int(min(self.num_tokens, self._times.num_tokens_in(spare_s, context)))  # any number, also infinity
        most = self._times.num_tokens_in(max(spare_s, LEAST_SHARE * fixed_s), context) / (1 + self._is_probe)
        return min(self.num_tokens, max(1, int(min(most, self.num_tokens))))

    def take(self, context: int, num_tokens: int) -> None:
        """Note a chunk of the step."""
        super().take(context, num_tokens)
        self._taken = self._with_chunk(context, num_tokens)

    def _with_chunk(self, context: int, num_tokens: int) -> StepWork:
        work = self._taken
        return work._replace(
            num_tokens=work.num_tokens + num_tokens,
            num_pairs=work.num_pairs + num_tokens * (context + num_tokens / 2),
            context=work.context + context,
            num_chunks=work.num_chunks + 1,
        )


class PrefillBudget:
    """Sizes the chunks of prompts so that a step takes no longer than a bound, by the times of the steps before.

    Nothing is assumed of the model or the machine but that a step's time is linear in `StepWork`.

    Args:
        bound_s: of a step in which sequences decode, in seconds.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._times = StepTimes()
        self._num_mixed = 0
        """Steps with prompts and decodes since the last one with decodes alone."""
        self._most_tokens = 0.0
        """Of chunks in one of the last steps."""

    def begin(self, num_decodes: int, num_tokens: int) -> ChunkBudget:
        """Return the budget of a step with so many decodes, of `num_tokens` at most."""
        if not num_decodes:
            return ChunkBudget(num_tokens)
        if self._num_mixed >= LOOK_EVERY:
            return ChunkBudget(0)
        num_tokens = min(num_tokens, max(FIRST_TOKENS, int(GROWTH * self._most_tokens)))
        if not self._times.knows_prompts:
            return ChunkBudget(num_tokens)
        is_probe = self._num_mixed % PROBE_EVERY == PROBE_EVERY - 1
        work = StepWork(1, num_decodes, 0, 0.0, 0, 0)
        return TimedBudget(num_tokens, self._times, work, self._bound_s, is_probe=is_probe)

    def note(self, step: ScheduledStep, seconds: float) -> None:
        """Learn from a step that was just collected."""
        if not step.decodes:
            return
        self._num_mixed = self._num_mixed + 1 if step.prefills else 0
        work = StepWork.of(step)
        if work is not None:
            self._times.note(work, seconds)
            if step.prefills:
                self._most_tokens = max(RECENT * self._most_tokens, work.num_tokens)


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
