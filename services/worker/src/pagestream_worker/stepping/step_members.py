"""Which sequences are in the running step, reported only on a change: most steps decode the same ones as the last."""

from dataclasses import dataclass

from pagestream_engine.scheduler.base import ScheduledStep


@dataclass(frozen=True)
class MembershipChange:
    """Sequences that entered the step, that left it unfinished, and all that are in it now."""

    entered: frozenset[str]
    left: frozenset[str]
    members: frozenset[str]


class StepMembers:
    """The sequences of the running step, by id."""

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._num_preemptions = 0

    def update(self, step: ScheduledStep, num_preemptions: int) -> MembershipChange | None:
        """Apply a step that is about to run. Returns None where no sequence entered and none left unfinished.

        A sequence enters with a chunk of its prompt, and leaves unfinished only by preemption; ends are reported to
        `discard`. So a step of decodes without a new preemption needs no look at its sequences.

        Args:
            step: the scheduler's plan.
            num_preemptions: the engine's counter.
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
        return MembershipChange(frozenset(entered), frozenset(left), frozenset(self._members))

    def discard(self, seq_id: str) -> None:
        """Remove a sequence that has ended or was aborted."""
        self._members.discard(seq_id)
