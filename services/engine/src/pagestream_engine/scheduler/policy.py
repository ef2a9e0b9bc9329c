"""Who goes first: the order of admission, and the reverse order of preemption."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

from pagestream_engine.errors import ConfigError
from pagestream_engine.request.sequence import Sequence, SequenceGroup


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
    """Waiting groups by the rank of their first member: O(log n) to push and pop. One that lost all its members is left
    behind and skipped."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], int, SequenceGroup]] = []
        self._num_groups = 0
        self._num_sequences = 0

    def __len__(self) -> int:
        """Sequences, not groups."""
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, _, group in self._heap for seq in group.members)

    def push(self, group: SequenceGroup) -> None:
        """Add a group, all of whose members wait."""
        first = group.members[0]
        heappush(self._heap, (self._policy.rank(first), first.arrival, group))
        self._num_groups += 1
        self._num_sequences += len(group.members)

    def peek(self) -> SequenceGroup | None:
        """The next one, which stays."""
        while self._heap and not self._heap[0][2].members:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> SequenceGroup:
        """Take the one that `peek` showed."""
        group = heappop(self._heap)[2]
        self._num_groups -= 1
        self._num_sequences -= len(group.members)
        return group

    def forget(self, seq: Sequence) -> None:
        """Take one sequence out of its group, which is in the queue."""
        seq.group.drop(seq)
        self._num_sequences -= 1
        self._num_groups -= not seq.group.members
        if len(self._heap) > 2 * self._num_groups + 64:
            self._heap = [entry for entry in self._heap if entry[2].members]
            heapify(self._heap)
