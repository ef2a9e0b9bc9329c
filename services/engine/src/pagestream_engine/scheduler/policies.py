"""The policies that come with the engine. None looks at a clock: equal requests are ordered equally in each run."""

from __future__ import annotations

from collections.abc import Mapping

from pagestream_engine.request import TokenSequence
from pagestream_engine.scheduler.length_predictor import LengthPredictor
from pagestream_engine.scheduler.policy import SchedulingPolicy

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

    def rank(self, seq: TokenSequence) -> float:
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

    def rank(self, seq: TokenSequence) -> float:
        """Return its arrival, later by `class_arrivals` for each class that it has not risen by its age."""
        return seq.arrival + self._class_arrivals * max(0.0, seq.priority - seq.aged_classes)

    def may_displace(self, waiting: TokenSequence, running: TokenSequence) -> bool:
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

    def rank(self, seq: TokenSequence) -> float:
        """Return the tokens that it had yet to compute and generate when it arrived, and `token_arrivals` for
        each arrival before it."""
        return self._ranks[seq.arrival]

    def arrived(self, seq: TokenSequence) -> None:
        """Reckon its rank."""
        output = max(0.0, self.predictor.expected(seq) - seq.num_output_tokens)
        self._ranks[seq.arrival] = len(seq.token_ids) + output + self._token_arrivals * seq.arrival

    def ended(self, seq: TokenSequence, *, is_complete: bool) -> None:
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

    def rank(self, seq: TokenSequence) -> float:
        """Return the number of its turn."""
        return self._turns[seq.arrival]

    def may_displace(self, waiting: TokenSequence, running: TokenSequence) -> bool:
        """Whether the one that runs has had its slice."""
        return running.num_output_tokens - self._begun_at[running.arrival] >= self._slice_tokens

    def arrived(self, seq: TokenSequence) -> None:
        """Queue it behind all others."""
        self._turns[seq.arrival] = self._num_turns
        self._num_turns += 1

    def scheduled(self, seq: TokenSequence) -> None:
        """Begin its slice."""
        self._begun_at[seq.arrival] = seq.num_output_tokens

    def preempted(self, seq: TokenSequence) -> None:
        """Queue it behind all others after a slice; one that lost its blocks before keeps its turn."""
        if seq.num_output_tokens - self._begun_at.pop(seq.arrival) >= self._slice_tokens:
            self.arrived(seq)

    def ended(self, seq: TokenSequence, *, is_complete: bool) -> None:
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

    def rank(self, seq: TokenSequence) -> float:
        """Return its tenant's virtual time when it arrived."""
        return self._starts[seq.arrival]

    def arrived(self, seq: TokenSequence) -> None:
        """Charge its tenant what is expected of it; of siblings the first is charged the prompt of all."""
        tenant = seq.tenant
        start = self._starts[seq.arrival] = max(self._now, self._tenants.get(tenant, 0.0))
        prompt, had = seq.num_prompt_tokens if seq is seq.group.members[0] else 0, seq.num_output_tokens
        output = max(0.0, self.predictor.expected(seq) - had)
        self._charged[seq.arrival] = prompt, output, had
        self._charge(seq, start, prompt + output)
        self._num_of[tenant] = self._num_of.get(tenant, 0) + 1

    def scheduled(self, seq: TokenSequence) -> None:
        """Move the time on to its place."""
        self._now = max(self._now, self._starts[seq.arrival])

    def ended(self, seq: TokenSequence, *, is_complete: bool) -> None:
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

    def _charge(self, seq: TokenSequence, since: float, tokens: float) -> None:
        self._tenants[seq.tenant] = since + tokens / self._weights.get(seq.tenant, seq.weight)

    def _forget_idle(self) -> None:
        """Forget tenants without sequences that are not ahead of the time, now and then."""
        if len(self._tenants) > 2 * len(self._num_of) + MOST_IDLE_TENANTS:
            idle = [name for name in self._tenants if name not in self._num_of]
            for name in idle:
                if self._tenants[name] <= self._now:
                    del self._tenants[name]
