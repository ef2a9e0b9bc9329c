"""Who goes first: the order of admission, the order of preemption, and the queue that waits by it.

None of the policies that come with the engine looks at a clock: equal requests are ordered equally in each run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import chain, islice, takewhile
from math import log2
from typing import Any, NamedTuple

from pagestream_engine.errors import ConfigError
from pagestream_engine.request import Request, Sequence


class SequenceEvents:
    """What a policy may learn of each sequence, siblings included. By default it learns nothing."""

    def arrived(self, seq: Sequence) -> None:
        """Note that a sequence was added; a resumed one has output tokens."""

    def scheduled(self, seq: Sequence) -> None:
        """Note that a sequence was admitted, at first or again."""

    def preempted(self, seq: Sequence) -> None:
        """Note that a running sequence has lost its place, before it is queued again."""

    def ended(self, seq: Sequence, *, is_complete: bool) -> None:
        """Note that a sequence is gone: complete, or aborted."""

    @property
    def learns(self) -> bool:
        """Whether one of these is defined anew: an engine calls none of them otherwise."""
        names = ("arrived", "scheduled", "preempted", "ended")
        return any(getattr(type(self), name) is not getattr(SequenceEvents, name) for name in names)


class SchedulingPolicy(SequenceEvents, ABC):
    """Decides the order in which sequences are admitted, which of them is preempted where blocks run out, and which
    loses its place to one that waits.

    A request goes by its first choice that waits. Of equal ranks the earlier arrival goes first. The ranks of a
    sequence are numbers other than NaN. They may depend on what it was added with (`num_prompt_tokens`, `params`,
    `priority`, `aged_classes`, `tenant`, `weight`, `arrival`), which a policy does not change, and on the events
    before; a sequence's own change only in `arrived` and `preempted`, of that sequence. So no two preempt each other in
    turns.
    """

    displaces = False
    """Whether `may_displace` is ever true; without, it is not asked."""

    interrupts = False
    """Whether a sequence of class 0 displaces those of lower classes: it may be added to a full engine."""

    queue_order = "fcfs"
    """The built-in policy by which requests go that wait in a queue outside of the engine, which several engines share:
    "fcfs" (by arrival and class), "shortest_first" or "fair"."""

    @abstractmethod
    def rank(self, seq: Sequence) -> float:
        """Return its place: the lowest rank is admitted first, and its prompt computed first."""

    def victim_rank(self, seq: Sequence) -> float:
        """Return its place in the order of preemption, by default `rank`: the highest is preempted first."""
        return self.rank(seq)

    def may_displace(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether the first one that waits, for want of a seat or of blocks, takes the place of one that runs.

        Those with the highest victim ranks lose theirs, no more than it needs. For two sequences it must not be true
        both ways without tokens in between: they would take turns for ever.
        """
        return False


Place = tuple[float, int]
"""Rank and arrival of the first choice of a request that waits: the lowest goes first."""


_Entry = tuple[float, int, list[Sequence]]
"""The place of a request, and its choices that wait."""


class WaitingQueue:
    """Requests by the rank of the first choice that waits: O(log n) to push and pop. One that lost all of these is left
    behind and skipped.

    Requests that may not start for now can be set aside, in lanes, or held back for the rest of a step; they stay in
    the queue, but are not shown.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        # Entries have the lists of choices that wait, not the requests, whose prompts an empty one must not keep.
        self._heap: list[_Entry] = []
        self._lanes: dict[str, list[_Entry]] = {}
        self._held_back: list[_Entry] = []
        self._num_requests = 0
        self.num_sequences = 0
        """Of all requests."""

    def __len__(self) -> int:
        """Sequences, not requests."""
        return self.num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        entries = chain(self._heap, self._held_back, *self._lanes.values())
        return (seq for _, _, waiting in entries for seq in waiting)

    def push(self, request: Request) -> None:
        """Add a request of which choices wait."""
        first = request.waiting[0]
        # The heap keeps this rank: it may change only while the sequence is outside (`arrived`, `preempted`).
        heappush(self._heap, (self._policy.rank(first), first.arrival, request.waiting))
        self._num_requests += 1
        self.num_sequences += len(request.waiting)

    def peek(self) -> Request | None:
        """The next one, which stays."""
        while self._heap and not self._heap[0][2]:
            heappop(self._heap)
        return self._heap[0][2][0].request if self._heap else None

    @property
    def head_place(self) -> Place:
        """Of the request that `peek` showed."""
        return self._heap[0][:2]

    @property
    def is_all_aside(self) -> bool:
        """Whether there is no request but those that were set aside."""
        return self.peek() is None

    @property
    def held_back(self) -> Iterator[Request]:
        """The requests that are not shown for the rest of this step."""
        return (waiting[0].request for _, _, waiting in self._held_back)

    def hold_back(self) -> None:
        """Show the requests behind the one that `peek` showed, until `show_held_back`."""
        self._held_back.append(heappop(self._heap))

    def show_held_back(self) -> None:
        """Show again what was held back, each in its place."""
        for entry in self._held_back:
            heappush(self._heap, entry)
        self._held_back.clear()

    def num_before_next(self) -> int:
        """Return how many of the waiting choices of the request that `peek` showed go before the request behind it, by
        their own ranks: at least the first."""
        entry = heappop(self._heap)
        behind = self._heap[0][:2] if self.peek() is not None else None
        heappush(self._heap, entry)
        waiting, rank = entry[2], self._policy.rank
        if behind is None:
            return len(waiting)
        return 1 + sum(1 for _ in takewhile(lambda seq: (rank(seq), seq.arrival) < behind, waiting[1:]))

    def set_aside(self, lane: str) -> None:
        """Move the request that `peek` showed to a lane."""
        heappush(self._lanes.setdefault(lane, []), heappop(self._heap))

    def take_back(self, lane: str) -> None:
        """Show a lane's requests again, each in its place."""
        for entry in self._lanes.pop(lane):
            heappush(self._heap, entry)

    def lanes(self) -> dict[str, Place]:
        """Return the place of the first request in each lane."""
        for lane, entries in list(self._lanes.items()):
            while entries and not entries[0][2]:
                heappop(entries)
            if not entries:
                del self._lanes[lane]
        return {lane: entries[0][:2] for lane, entries in self._lanes.items()}

    def pop(self) -> Request:
        """Take the one that `peek` showed."""
        waiting = heappop(self._heap)[2]
        self._num_requests -= 1
        self.num_sequences -= len(waiting)
        return waiting[0].request

    def forget(self, seq: Sequence) -> None:
        """Take one sequence out of its request, which is in the queue."""
        request = seq.request
        request.waiting.remove(seq)
        request.sequences.remove(seq)
        self.num_sequences -= 1
        self._num_requests -= not request.waiting
        if len(self._heap) + sum(map(len, self._lanes.values())) > 2 * self._num_requests + 64:
            self._keep(bool)

    def requeue(self, seqs: Iterable[Sequence]) -> None:
        """Queue choices of a prompt that have run, with those of it that wait, each in the place of its rank."""
        seqs = list(seqs)
        request = seqs[0].request
        if request.waiting:
            own = request.waiting
            self._keep(lambda waiting: waiting is not own)
            self._num_requests -= 1
            self.num_sequences -= len(own)
            seqs = sorted([*own, *seqs], key=lambda seq: (self._policy.rank(seq), seq.arrival))
        request.waiting = seqs
        self.push(request)

    def _keep(self, is_kept: Callable[[list[Sequence]], bool]) -> None:
        for entries in (self._heap, *self._lanes.values()):
            entries[:] = [entry for entry in entries if is_kept(entry[2])]
            heapify(entries)


CLASS_ARRIVALS = 256
"""Sequences of the class above that came later and overtake one, at most."""
TOKEN_ARRIVALS = 16
"""A sequence of n tokens is overtaken by at most n over this number of sequences that came later."""
SLICE_TOKENS = 64
"""Tokens that a sequence generates in its turn, before one that waits may take its place: some seconds of a stream, so
that what taking turns costs (its context is computed or found again) does not count for much."""
MOST_IDLE_TENANTS = 256
"""Tenants without sequences whose virtual times are kept."""


class FirstComeFirstServed(SchedulingPolicy):
    """By arrival: a preempted sequence goes before everything that came after it."""

    def rank(self, seq: Sequence) -> float:
        """Return its arrival."""
        return seq.arrival


class PriorityFirst(SchedulingPolicy):
    """By class, 0 first, with ageing. Where a sequence of class 0 finds no room, the lowest classes make it.

    A sequence of class c is overtaken, or displaced, by fewer than c * `class_arrivals` sequences that came later; by
    as many less as it has risen in classes while it waited in a queue before.

    Args:
        class_arrivals: arrivals that one class is worth.
    """

    displaces = interrupts = True

    def __init__(self, class_arrivals: int = CLASS_ARRIVALS) -> None:
        self._class_arrivals = class_arrivals

    def rank(self, seq: Sequence) -> float:
        """Return its arrival, later by `class_arrivals` for each class that it has not risen by its age."""
        return seq.arrival + self._class_arrivals * max(0.0, seq.priority - seq.aged_classes)

    def may_displace(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether it is of class 0, and before one of another class in the order."""
        return waiting.priority == 0 < running.priority and self.rank(waiting) < self.rank(running)


class ShortestFirst(SchedulingPolicy):
    """By tokens: those of the prompt and those that are expected of the output, with ageing.

    A sequence of n tokens is overtaken by fewer than n / `token_arrivals` that came later.

    Args:
        token_arrivals: tokens that one arrival is worth.
    """

    queue_order = "shortest_first"

    def __init__(self, token_arrivals: int = TOKEN_ARRIVALS) -> None:
        self._token_arrivals = token_arrivals
        self.predictor = LengthPredictor()
        self._ranks: dict[int, float] = {}

    def rank(self, seq: Sequence) -> float:
        """Return the tokens that it had yet to compute and generate when it arrived, and `token_arrivals` for
        each arrival before it."""
        return self._ranks[seq.arrival]

    def arrived(self, seq: Sequence) -> None:
        """Reckon its rank."""
        output = max(0.0, self.predictor.expected(seq) - seq.num_output_tokens)
        self._ranks[seq.arrival] = len(seq.token_ids) + output + self._token_arrivals * seq.arrival

    def ended(self, seq: Sequence, *, is_complete: bool) -> None:
        """Learn its length."""
        del self._ranks[seq.arrival]
        if is_complete:
            self.predictor.note(seq)


class RoundRobin(SchedulingPolicy):
    """By turns: a sequence that has generated its slice makes room for one that waits, and queues behind all others.

    So one that waits as the n-th gets its turn after at most n slices. What it had computed is found again by the
    prefix cache, as far as its blocks were not needed.

    Args:
        slice_tokens: that a sequence generates in its turn.
    """

    displaces = True

    def __init__(self, slice_tokens: int = SLICE_TOKENS) -> None:
        self._slice_tokens = slice_tokens
        self._num_turns = 0
        self._turns: dict[int, int] = {}
        self._begun_at: dict[int, int] = {}
        """Output tokens at the beginning of the turn; of those that run."""

    def rank(self, seq: Sequence) -> float:
        """Return the number of its turn."""
        return self._turns[seq.arrival]

    def may_displace(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether the one that runs has had its slice."""
        return running.num_output_tokens - self._begun_at[running.arrival] >= self._slice_tokens

    def arrived(self, seq: Sequence) -> None:
        """Queue it behind all others."""
        self._turns[seq.arrival] = self._num_turns
        self._num_turns += 1

    def scheduled(self, seq: Sequence) -> None:
        """Begin its slice."""
        self._begun_at[seq.arrival] = seq.num_output_tokens

    def preempted(self, seq: Sequence) -> None:
        """Queue it behind all others after a slice; one that lost its blocks before keeps its turn."""
        if seq.num_output_tokens - self._begun_at.pop(seq.arrival) >= self._slice_tokens:
            self.arrived(seq)

    def ended(self, seq: Sequence, *, is_complete: bool) -> None:
        """Forget it."""
        del self._turns[seq.arrival]
        self._begun_at.pop(seq.arrival, None)


class FairByTenant(SchedulingPolicy):
    """Equal tokens for all tenants that have requests, or tokens by their weights: start-time fair queueing
    (Goyal, Vin, Cheng 1996).

    Each tenant has a virtual time, which its requests move on by their tokens over its weight; that of a tenant that
    comes anew begins at the time of the request that was admitted last. The request whose tenant is behind goes first.
    So one of a tenant without others is overtaken by at most one request of each other tenant that came later, and
    waits for none of their floods.

    Args:
        weights: of tenants; those that are not named have what their sequences were added with, by default 1.
    """

    queue_order = "fair"

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self.predictor = LengthPredictor()
        self._now = 0.0
        self._tenants: dict[str, float] = {}
        """Virtual times of the tenants with sequences."""
        self._num_of: dict[str, int] = {}
        self._starts: dict[int, float] = {}
        self._charged: dict[int, tuple[int, float, int]] = {}
        """Of a sequence: prompt tokens, those expected of its output, and those of it that others have generated."""

    def rank(self, seq: Sequence) -> float:
        """Return its tenant's virtual time when it arrived."""
        return self._starts[seq.arrival]

    def arrived(self, seq: Sequence) -> None:
        """Charge its tenant what is expected of it; of siblings the first is charged the prompt of all."""
        tenant = seq.tenant
        start = self._starts[seq.arrival] = max(self._now, self._tenants.get(tenant, 0.0))
        prompt, had = seq.num_prompt_tokens if seq is seq.request.sequences[0] else 0, seq.num_output_tokens
        output = max(0.0, self.predictor.expected(seq) - had)
        self._charged[seq.arrival] = prompt, output, had
        self._charge(seq, start, prompt + output)
        self._num_of[tenant] = self._num_of.get(tenant, 0) + 1

    def scheduled(self, seq: Sequence) -> None:
        """Move the time on to its place."""
        self._now = max(self._now, self._starts[seq.arrival])

    def ended(self, seq: Sequence, *, is_complete: bool) -> None:
        """Charge what it has generated here in place of what was expected; of one that never ran nothing."""
        tenant = seq.tenant
        del self._starts[seq.arrival]
        prompt, output, had = self._charged.pop(seq.arrival)
        paid = prompt if seq.was_admitted else 0
        self._charge(seq, self._tenants[tenant], paid + seq.num_output_tokens - had - prompt - output)
        if is_complete:
            self.predictor.note(seq)
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
        self._forget_idle()

    def _charge(self, seq: Sequence, since: float, tokens: float) -> None:
        self._tenants[seq.tenant] = since + tokens / self._weights.get(seq.tenant, seq.weight)

    def _forget_idle(self) -> None:
        """Forget tenants without sequences that are not ahead of the time, now and then."""
        if len(self._tenants) > 2 * len(self._num_of) + MOST_IDLE_TENANTS:
            idle = [name for name in self._tenants if name not in self._num_of]
            for name in idle:
                if self._tenants[name] <= self._now:
                    del self._tenants[name]


_BUILT_IN: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityFirst,
    "shortest_first": ShortestFirst,
    "round_robin": RoundRobin,
    "fair": FairByTenant,
}
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


OCTAVE_PARTS = 4
"""Prompts whose lengths lie within this part of an octave are alike. Mean absolute error on the conversations of the
Azure trace of 2023: whole octaves 67 tokens, halves 55, quarters 46, eighths 45."""
PRIOR = 8
"""Requests that it takes until those that are most alike weigh as much as all others."""
_Key = tuple[int | str, ...]
"""Of a median: () of all requests, then the part of an octave of the prompt's length, the tenant, and the power of two
of what the answer may have at most."""
LENGTH_MEMORY = 200
"""Requests that a median is of, about."""
MOST_MEDIANS = 4096
"""Of tenants and lengths; beyond, the one that was needed least recently goes."""
LEAST_SCALE = 8.0
"""Tokens that a median moves by at least, times the weight of a request."""


class _Median:
    """A running median: it moves a part of itself towards each value, a smaller one the more values it knows."""

    __slots__ = ("num_values", "value")

    def __init__(self) -> None:
        self.num_values = 0
        self.value = 0.0

    def note(self, value: float) -> None:
        self.num_values = min(self.num_values + 1, LENGTH_MEMORY)
        if self.num_values == 1:
            self.value = value
            return
        step = max(self.value, LEAST_SCALE) / self.num_values
        self.value += min(step, max(-step, value - self.value))


class RequestShape(NamedTuple):
    """What is known of a request's length before it runs."""

    num_prompt_tokens: int
    tenant: str
    most_output_tokens: int


class LengthPredictor:
    """Medians of output lengths, of ever more similar requests: all, prompts about as long, the tenant's among these,
    and those with a similar `max_tokens`. Each is blended with the one before by how many requests it knows."""

    def __init__(self) -> None:
        self._medians: dict[_Key, _Median] = {}

    def expected(self, seq: Sequence) -> float:
        """Return the output tokens to expect of a sequence, at most what it may have."""
        return self.expected_of(_shape(seq))

    def expected_of(self, shape: RequestShape) -> float:
        """Return the output tokens to expect of a request, at most what it may have."""
        most = shape.most_output_tokens
        found = float(most)
        weight = 0  # `max_tokens` counts only until something is known
        for key in _keys(shape):
            median = self._medians.get(key)
            if median is not None:
                found = (found * weight + median.value * median.num_values) / (weight + median.num_values)
            weight = PRIOR
        return min(found, float(most))

    def note(self, seq: Sequence) -> None:
        """Learn from a sequence that is complete."""
        self.note_length(_shape(seq), seq.num_output_tokens)

    def note_length(self, shape: RequestShape, num_output_tokens: int) -> None:
        """Learn from a request that is complete."""
        for key in _keys(shape):
            median = self._medians.pop(key, None) or _Median()
            median.note(num_output_tokens)
            self._medians[key] = median
        while len(self._medians) > MOST_MEDIANS:
            del self._medians[next(iter(self._medians))]

    def table(self, most_rows: int) -> dict[str, Any]:
        """Return the medians that were needed last, for others to expect by: a JSON document.

        "rows" has [part of the octave of the prompt's length or None for any, tenant or None, median, requests], at
        most `most_rows`; "octave_parts" and "prior" are the constants here.
        """
        rows = [
            [*key, *(None,) * (2 - len(key)), round(median.value), median.num_values]
            for key, median in islice(reversed(self._medians.items()), 2 * most_rows)
            if len(key) <= 2
        ]
        return {"octave_parts": OCTAVE_PARTS, "prior": PRIOR, "rows": rows[:most_rows]}


def _shape(seq: Sequence) -> RequestShape:
    return RequestShape(seq.num_prompt_tokens, seq.tenant, seq.requested_total_tokens - seq.num_prompt_tokens)


def _keys(shape: RequestShape) -> Iterator[_Key]:
    length = int(OCTAVE_PARTS * log2(shape.num_prompt_tokens))
    yield ()
    yield (length,)
    yield length, shape.tenant
    yield length, shape.tenant, shape.most_output_tokens.bit_length()
