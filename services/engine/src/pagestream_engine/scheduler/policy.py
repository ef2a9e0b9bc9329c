"""Who goes first: the order of admission, and the order of preemption."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, takewhile

from pagestream_engine.request import SequenceGroup, TokenSequence


class SequenceEvents:
    """What a policy may learn of each sequence, siblings included. By default it learns nothing."""

    def arrived(self, seq: TokenSequence) -> None:
        """Note that a sequence was added; a resumed one has output tokens."""

    def scheduled(self, seq: TokenSequence) -> None:
        """Note that a sequence was admitted, at first or again."""

    def preempted(self, seq: TokenSequence) -> None:
        """Note that a running sequence has lost its place, before it is queued again."""

    def ended(self, seq: TokenSequence, *, is_complete: bool) -> None:
        """Note that a sequence is gone: complete, or aborted."""


class SchedulingPolicy(SequenceEvents, ABC):
    """Decides the order in which sequences are admitted, which of them is preempted where blocks run out, and which
    loses its place to one that waits.

    A group of siblings goes by its first. Of equal ranks the earlier arrival goes first. The ranks of a sequence are
    numbers other than NaN. They may depend on what it was added with (`num_prompt_tokens`, `params`, `priority`,
    `aged_classes`, `tenant`, `weight`, `arrival`), which a policy does not change, and on the events before; a
    sequence's own change only in `arrived` and `preempted`, of that sequence. So no two preempt each other in turns.
    """

    displaces = False
    """Whether `may_displace` is ever true; without, it is not asked."""

    interrupts = False
    """Whether a sequence of class 0 displaces those of lower classes: it may be added to a full engine."""

    queue_order = "fcfs"
    """The built-in policy by which requests go that wait in a queue outside of the engine, which several engines share:
    "fcfs" (by arrival and class), "shortest_first" or "fair"."""

    @abstractmethod
    def rank(self, seq: TokenSequence) -> float:
        """Return its place: the lowest rank is admitted first, and its prompt computed first."""

    def victim_rank(self, seq: TokenSequence) -> float:
        """Return its place in the order of preemption, by default `rank`: the highest is preempted first."""
        return self.rank(seq)

    def may_displace(self, waiting: TokenSequence, running: TokenSequence) -> bool:
        """Whether the first one that waits, for want of a seat or of blocks, takes the place of one that runs.

        Those with the highest victim ranks lose theirs, no more than it needs. For two sequences it must not be true
        both ways without tokens in between: they would take turns for ever.
        """
        return False


Place = tuple[float, int]
"""Rank and arrival of a group's first member: the lowest goes first."""


class WaitingQueue:
    """Waiting groups by the rank of their first member: O(log n) to push and pop. One that lost all its members is left
    behind and skipped.

    Groups that may not start for now can be set aside, in lanes, or held back for the rest of a step; they stay in the
    queue, but are not shown.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, SequenceGroup]] = []
        self._lanes: dict[str, list[tuple[float, int, SequenceGroup]]] = {}
        self._held_back: list[tuple[float, int, SequenceGroup]] = []
        self._num_groups = 0
        self._num_sequences = 0

    def __len__(self) -> int:
        """Sequences, not groups."""
        return self._num_sequences

    def __iter__(self) -> Iterator[TokenSequence]:
        entries = chain(self._heap, self._held_back, *self._lanes.values())
        return (seq for _, _, group in entries for seq in group.members)

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

    @property
    def head_place(self) -> Place:
        """Of the group that `peek` showed."""
        return self._heap[0][:2]

    @property
    def is_all_aside(self) -> bool:
        """Whether there is no group but those that were set aside."""
        return self.peek() is None

    @property
    def held_back(self) -> Iterator[SequenceGroup]:
        """The groups that are not shown for the rest of this step."""
        return (group for _, _, group in self._held_back)

    def hold_back(self) -> None:
        """Show the groups behind the one that `peek` showed, until `show_held_back`."""
        self._held_back.append(heappop(self._heap))

    def show_held_back(self) -> None:
        """Show again what was held back, each in its place."""
        for entry in self._held_back:
            heappush(self._heap, entry)
        self._held_back.clear()

    def num_before_next(self) -> int:
        """Return how many of the members of the group that `peek` showed go before the group behind it, by their own
        ranks: at least the first."""
        entry = heappop(self._heap)
        behind = self._heap[0][:2] if self.peek() is not None else None
        heappush(self._heap, entry)
        members, rank = entry[2].members, self._policy.rank
        if behind is None:
            return len(members)
        return 1 + sum(1 for _ in takewhile(lambda seq: (rank(seq), seq.arrival) < behind, members[1:]))

    def set_aside(self, lane: str) -> None:
        """Move the group that `peek` showed to a lane."""
        heappush(self._lanes.setdefault(lane, []), heappop(self._heap))

    def take_back(self, lane: str) -> None:
        """Show a lane's groups again, each in its place."""
        for entry in self._lanes.pop(lane):
            heappush(self._heap, entry)

    def lanes(self) -> dict[str, Place]:
        """Return the place of the first group in each lane."""
        for lane, entries in list(self._lanes.items()):
            while entries and not entries[0][2].members:
                heappop(entries)
            if not entries:
                del self._lanes[lane]
        return {lane: entries[0][:2] for lane, entries in self._lanes.items()}

    def pop(self) -> SequenceGroup:
        """Take the one that `peek` showed."""
        group = heappop(self._heap)[2]
        self._num_groups -= 1
        self._num_sequences -= len(group.members)
        return group

    def forget(self, seq: TokenSequence) -> None:
        """Take one sequence out of its group, which is in the queue."""
        seq.group.drop(seq)
        self._num_sequences -= 1
        self._num_groups -= not seq.group.members
        if len(self._heap) + sum(map(len, self._lanes.values())) > 2 * self._num_groups + 64:
            for entries in (self._heap, *self._lanes.values()):
                entries[:] = [entry for entry in entries if entry[2].members]
                heapify(entries)

    def merge(self, group: SequenceGroup, joining: SequenceGroup) -> None:
        """Let the members of a group that is not queued join a waiting one, each in the place of its rank."""
        for entries in (self._heap, *self._lanes.values()):
            entries[:] = [entry for entry in entries if entry[2] is not group]
            heapify(entries)
        self._num_groups -= 1
        self._num_sequences -= len(group.members)
        merged = [*group.members, *joining.members]
        merged.sort(key=lambda seq: (self._policy.rank(seq), seq.arrival))
        both = SequenceGroup(merged)
        both.num_passed = group.num_passed
        self.push(both)
