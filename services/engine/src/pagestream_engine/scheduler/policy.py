"""Who goes first: the order of admission, and the reverse order of preemption."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

from pagestream_engine.errors import ConfigError
from pagestream_engine.sequence import Sequence, SequenceState


class QueuePolicy(Protocol):
    """Ranks sequences. A rank must not change while its sequence waits."""

    def rank(self, seq: Sequence) -> tuple[int, ...]:
        """The lowest rank is admitted first, the highest is preempted first."""
        ...


class FirstComeFirstServed:
    """By arrival: a preempted sequence goes before everything that came after it."""

    def rank(self, seq: Sequence) -> tuple[int, ...]:
        return (seq.arrival,)


_POLICIES: dict[str, type[QueuePolicy]] = {"fcfs": FirstComeFirstServed}


def make_policy(name: str) -> QueuePolicy:
    """The policy of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _POLICIES:
        raise ConfigError("scheduling_policy", name, f"one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()


class WaitingQueue:
    """Waiting sequences by rank: O(log n) to push and pop. An aborted one is left behind and skipped."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], int, Sequence]] = []
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, _, seq in self._heap if seq.state is SequenceState.WAITING)

    def push(self, seq: Sequence) -> None:
        """Adds a sequence whose state is WAITING."""
        heappush(self._heap, (self._policy.rank(seq), seq.arrival, seq))
        self._len += 1

    def peek(self) -> Sequence | None:
        """The next one, which stays."""
        while self._heap and self._heap[0][2].state is not SequenceState.WAITING:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the one that `peek` showed."""
        self._len -= 1
        return heappop(self._heap)[2]

    def forget(self) -> None:
        """Notes that one sequence has left the state WAITING while it was in the queue."""
        self._len -= 1
        if len(self._heap) > 2 * self._len + 64:
            self._heap = [entry for entry in self._heap if entry[2].state is SequenceState.WAITING]
            heapify(self._heap)
