"""How many prompt tokens a step may have beside its decodes, where inter-token latency has a bound."""

from __future__ import annotations

from pagestream_engine.scheduler.scheduled_step import ScheduledStep
from pagestream_engine.scheduler.step_times import StepTimes, StepWork

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


class ChunkBudget:
    """Prompt tokens that one step may still have, by their number, and by their time where decodes are bounded.

    Args:
        num_tokens: most of all chunks.
        times: what tokens take; None: time does not matter.
        decodes: the step without prompts.
        bound_s: what it may take.
        is_probe: whether its first chunk has half of what fits.
    """

    __slots__ = ("_bound_s", "_is_probe", "_taken", "_times", "num_tokens")

    def __init__(
        self,
        num_tokens: int,
        times: StepTimes | None = None,
        decodes: StepWork | None = None,
        bound_s: float = 0.0,
        *,
        is_probe: bool = False,
    ) -> None:
        self.num_tokens = num_tokens
        """What is left of them, whatever they take."""
        self._times = times
        self._taken = decodes
        self._bound_s = bound_s
        self._is_probe = is_probe

    def limit(self, context: int) -> int:
        """Return the most tokens of a chunk with so many tokens before it; 0: none fits any more."""
        if self._times is None or self._taken is None or not self.num_tokens:
            return self.num_tokens
        work = self._with_chunk(self._taken, context, 0)
        fixed_s = self._times.expected_s(work)
        spare_s = self._bound_s - fixed_s
        if self._taken.num_chunks:
            return int(min(self.num_tokens, self._times.num_tokens_in(spare_s, context)))  # any number, also infinity
        most = self._times.num_tokens_in(max(spare_s, LEAST_SHARE * fixed_s), context) / (1 + self._is_probe)
        return min(self.num_tokens, max(1, int(min(most, self.num_tokens))))

    def take(self, context: int, num_tokens: int) -> None:
        """Note a chunk of the step."""
        self.num_tokens -= num_tokens
        if self._taken is not None:
            self._taken = self._with_chunk(self._taken, context, num_tokens)

    @staticmethod
    def _with_chunk(work: StepWork, context: int, num_tokens: int) -> StepWork:
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
        bound_s: of a step in which sequences decode, in seconds; None: no bound.
    """

    def __init__(self, bound_s: float | None) -> None:
        self._bound_s = bound_s
        self._times = StepTimes()
        self._num_mixed = 0
        """Steps with prompts and decodes since the last one with decodes alone."""
        self._most_tokens = 0.0
        """Of chunks in one of the last steps."""

    def begin(self, num_decodes: int, num_tokens: int) -> ChunkBudget:
        """Return the budget of a step with so many decodes, of `num_tokens` at most."""
        if self._bound_s is None or not num_decodes:
            return ChunkBudget(num_tokens)
        if self._num_mixed >= LOOK_EVERY:
            return ChunkBudget(0)
        num_tokens = min(num_tokens, max(FIRST_TOKENS, int(GROWTH * self._most_tokens)))
        if not self._times.knows_prompts:
            return ChunkBudget(num_tokens)
        is_probe = self._num_mixed % PROBE_EVERY == PROBE_EVERY - 1
        work = StepWork(1, num_decodes, 0, 0.0, 0, 0)
        return ChunkBudget(num_tokens, self._times, work, self._bound_s, is_probe=is_probe)

    def note(self, step: ScheduledStep, seconds: float) -> None:
        """Learn from a step that was just collected."""
        if self._bound_s is None or not step.decodes:
            return
        self._num_mixed = self._num_mixed + 1 if step.prefills else 0
        work = StepWork.of(step)
        if work is not None:
            self._times.note(work, seconds)
            if step.prefills:
                self._most_tokens = max(RECENT * self._most_tokens, work.num_tokens)
