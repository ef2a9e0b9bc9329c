"""Who is in the running step, told only when that changes: most steps decode the same sequences as the one before."""

from dataclasses import dataclass

from pagestream_engine.scheduler.base import ScheduledStep


@dataclass(frozen=True)
class StepChange:
    """Sequences that came into the step or left it to wait; `members` are all that are in it now."""

    entered: frozenset[str]
    left: frozenset[str]
    members: frozenset[str]


class StepSet:
    """The sequences of the running step, by id."""

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._num_preemptions = 0

    def update(self, step: ScheduledStep, num_preemptions: int) -> StepChange | None:
        """Take a step that is about to run; None where nobody came, and nobody left but by an end.

        A sequence comes with a chunk of its prompt, and leaves unfinished only where there was a preemption.
        """
        preempted = num_preemptions != self._num_preemptions
        if not step.prefills and not preempted:
            return None
        self._num_preemptions = num_preemptions
        prefilling = {seq.seq_id for chunk in step.prefills for seq in (chunk.seq, *chunk.siblings)}
        entered = prefilling - self._members
        left: set[str] = set()
        if preempted:
            left = self._members - prefilling - {entry.seq.seq_id for entry in step.decodes}
        self._members |= entered
        self._members -= left
        if not entered and not left:
            return None
        return StepChange(frozenset(entered), frozenset(left), frozenset(self._members))

    def discard(self, seq_id: str) -> None:
        """It has ended."""
        self._members.discard(seq_id)
