"""Smaller steps after one that ran out of memory, until they fit or the request is found that does not fit alone."""

from __future__ import annotations

from pagestream_engine.request import SequenceState, TokenSequence
from pagestream_engine.scheduler.scheduled_step import ScheduledSequence, ScheduledStep

SMALLEST_CHUNK = 16
"""Tokens of a prompt that are not divided further."""
ROUNDS_BEFORE_GROWTH = 4
"""How often all sequences have their turn in steps of one size before steps of twice that size are tried."""


class StepLimit:
    """Trims scheduled steps. Nothing is trimmed until a step has failed.

    After a failure steps hold half as many sequences as the failed one, which take turns: first those of the failed
    step, so that the one that does not fit is found by halving, then all in rounds. The others keep their blocks while
    they wait for their turn.
    """

    def __init__(self) -> None:
        self._max_sequences: int | None = None
        self._max_tokens: int | None = None
        """Of a step with one sequence."""
        self._turns: set[TokenSequence] = set()
        """Those that have still to run in this round."""
        self._num_rounds = 0

    def trim(self, step: ScheduledStep) -> None:
        """Take out of a step what exceeds the limit, before it runs."""
        if self._max_sequences is None:
            return
        entries = [*step.prefills, *step.decodes]
        self._turns = {seq for seq in self._turns if seq.state is not SequenceState.FINISHED}
        if not self._turns:
            self._begin_round(entries)
        if self._max_sequences is None:
            return
        due = [entry for entry in entries if entry.seq in self._turns] or entries
        kept = {id(entry) for entry in due[: self._max_sequences]}
        step.prefills[:] = [self._cut(chunk) for chunk in step.prefills if id(chunk) in kept]
        step.decodes[:] = [entry for entry in step.decodes if id(entry) in kept]
        self._turns.difference_update(entry.seq for entry in entries if id(entry) in kept)

    def shrink(self, failed: ScheduledStep) -> list[TokenSequence]:
        """Note that a step ran out of memory.

        Returns:
            The choices of one request that does not fit alone, and must end. Empty: smaller steps may fit.
        """
        entries = [*failed.prefills, *failed.decodes]
        self._num_rounds = 0
        self._turns = {entry.seq for entry in entries}
        self._max_sequences = max(1, len(entries) // 2)
        if len(entries) != 1:
            return []
        (entry,) = entries
        if entry.num_scheduled_tokens > SMALLEST_CHUNK:
            self._max_tokens = entry.num_scheduled_tokens // 2
            return []
        self._max_sequences = self._max_tokens = None
        return [entry.seq, *entry.siblings]

    def _begin_round(self, entries: list[ScheduledSequence]) -> None:
        self._turns = {entry.seq for entry in entries}
        self._num_rounds += 1
        if self._max_sequences is None or self._num_rounds <= ROUNDS_BEFORE_GROWTH:
            return
        self._num_rounds = 0
        self._max_tokens = None
        self._max_sequences *= 2
        if self._max_sequences >= len(entries):
            self._max_sequences = None

    def _cut(self, chunk: ScheduledSequence) -> ScheduledSequence:
        if self._max_tokens is None or chunk.num_scheduled_tokens <= self._max_tokens:
            return chunk
        return ScheduledSequence(chunk.seq, self._max_tokens, needs_sample=False)
