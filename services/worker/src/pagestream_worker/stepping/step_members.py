"""Which sequences are in the running step, reported only on a change: most steps decode the same ones as the last."""

from collections.abc import Callable, Collection
from dataclasses import dataclass


def request_id_of(seq_id: str) -> str:
    """Return the id of a sequence's request: `<request id>/<nonce of the claim>/<choice>`."""
    return seq_id.partition("/")[0]


@dataclass(frozen=True)
class MembershipChange:
    """Sequences that entered a step, and requests of which no sequence is in it any more."""

    entered: frozenset[str]
    left_requests: frozenset[str]


class StepMembers:
    """The sequences of the running step, by id."""

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._num_requeues = 0

    def update(
        self, prefilling: Collection[str], decoding: Callable[[], Collection[str]], num_requeues: int
    ) -> MembershipChange | None:
        """Apply a step that is about to run. Returns None where no sequence entered and none left unfinished.

        A sequence enters with a chunk of its prompt, and leaves unfinished only where it goes back to the queue
        (preempted, or rolled back with a failed step); ends are reported to `discard`. So a step of decodes without a
        new requeue needs no look at its sequences.

        Args:
            prefilling: sequences with prompt tokens in the step.
            decoding: returns its other sequences; called only after a requeue.
        """
        requeued = num_requeues != self._num_requeues
        if not prefilling and not requeued:
            return None
        self._num_requeues = num_requeues
        entered = frozenset(prefilling) - self._members
        left: set[str] = set()
        if requeued:
            left = self._members.difference(prefilling, decoding())
        self._members |= entered
        self._members -= left
        if not entered and not left:
            return None
        left_requests = {request_id_of(seq_id) for seq_id in left}
        if left_requests:
            left_requests.difference_update(map(request_id_of, self._members))
        return MembershipChange(entered, frozenset(left_requests))

    def discard(self, seq_id: str) -> None:
        """Remove a sequence that has ended or was aborted."""
        self._members.discard(seq_id)
