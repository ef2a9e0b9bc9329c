"""Who goes first: the order of admission, and the order of preemption."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from pagestream_engine.errors import ConfigError
from pagestream_engine.request.sequence import SequenceGroup, TokenSequence


class SchedulingPolicy(ABC):
    """Decides the order in which sequences are admitted, and which of them is preempted where blocks run out.

    A group of siblings goes by its first. Of equal ranks the earlier arrival goes first. The ranks of a sequence are
    numbers other than NaN that never change, and are functions of what it was added with (`num_prompt_tokens`,
    `params`, `priority`, `arrival`), which a policy does not change. So no two preempt each other in turns.
    """

    @abstractmethod
    def rank(self, seq: TokenSequence) -> float:
        """Return its place: the lowest rank is admitted first, and its prompt computed first."""

    def victim_rank(self, seq: TokenSequence) -> float:
        """Return its place in the order of preemption, by default `rank`: the highest is preempted first."""
        return self.rank(seq)


class FirstComeFirstServed(SchedulingPolicy):
    """By arrival: a preempted sequence goes before everything that came after it."""

    def rank(self, seq: TokenSequence) -> float:
        """Return its arrival."""
        return seq.arrival


_BUILT_IN: dict[str, Callable[[], SchedulingPolicy]] = {"fcfs": FirstComeFirstServed}
_registered: dict[str, Callable[[], SchedulingPolicy]] = {}


def register_policy(name: str, factory: Callable[[], SchedulingPolicy]) -> None:
    """Let `scheduling_policy` name a policy of one's own, in this process; it comes before a built-in one of that name.

    Call it in a module that `plugins` names: each process that schedules imports that one.

    Args:
        name: what settings say.
        factory: makes the policy of one engine, such as the class; replaces an earlier one of the same name.

    Raises:
        ConfigError: the factory can't be called.
    """
    if not callable(factory):
        raise ConfigError("factory", factory, "a SchedulingPolicy's class, or a function that returns a policy")
    _registered[name] = factory


def make_policy(name: str) -> SchedulingPolicy:
    """Make the policy of this name.

    Raises:
        ConfigError: there is none, or its factory makes something else.
    """
    factories = _BUILT_IN | _registered
    if name not in factories:
        hint = "a module that plugins names adds others by register_policy"
        raise ConfigError("scheduling_policy", name, f"one of {', '.join(factories)}", hint)
    policy = factories[name]()
    if not isinstance(policy, SchedulingPolicy):
        raise ConfigError("scheduling_policy", policy, f"a SchedulingPolicy from the factory of {name!r}")
    return policy


class WaitingQueue:
    """Waiting groups by the rank of their first member: O(log n) to push and pop. One that lost all its members is left
    behind and skipped."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, SequenceGroup]] = []
        self._num_groups = 0
        self._num_sequences = 0

    def __len__(self) -> int:
        """Sequences, not groups."""
        return self._num_sequences

    def __iter__(self) -> Iterator[TokenSequence]:
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

    def forget(self, seq: TokenSequence) -> None:
        """Take one sequence out of its group, which is in the queue."""
        seq.group.drop(seq)
        self._num_sequences -= 1
        self._num_groups -= not seq.group.members
        if len(self._heap) > 2 * self._num_groups + 64:
            self._heap = [entry for entry in self._heap if entry[2].members]
            heapify(self._heap)
