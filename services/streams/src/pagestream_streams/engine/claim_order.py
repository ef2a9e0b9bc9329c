"""The order of claims over partitions, as far as an engine knows it, and what wakes it for new work.

Every queued request has a key, and the smaller one goes first; `order_key` in prelude.lua computes it. A claim's reply
names the first keys of its partition; a claim for nothing only asks for them. Here they are merged. Times are seconds
on one monotonic clock, given by the caller; no command is sent here.

Messages on the model's channel are lost at times: claims ask partitions again that have not rung for a while.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagestream_streams.tasks import wait_for_event

SLACK_MS = 100
"""Difference of keys that does not count: what lies that close is claimed together, own partitions first. With
settings.steal_after_ms and LOOK_PAUSE_S it stays below the 250 ms that are promised."""
LOOK_PAUSE_S = 0.05
"""A partition with known heads is not asked again sooner, however often it rings."""
REFRESH_S = 0.2
"""A partition that did not ring is asked again after this time: what a lost message costs ..."""
REFRESH_EACH_S = 0.004
"""... or after this time for each partition, which bounds what an engine asks to 250 a second."""
REFRESH_AT_ONCE = 32
"""Most partitions that are asked again at once only because of their age, so that their turns spread."""
BEFORE_ALL = -(10**14)
"""A bound below all keys, also those of begun requests."""
AWAY_S = 1.0
"""A partition whose node did not answer is left out for so long."""


class Head(NamedTuple):
    """A queued request that a partition would give."""

    key: int
    tokens: int
    stays: bool = False
    """Whether an engine that owns its partition keeps room for it rather than have it overtaken."""


class Heads(NamedTuple):
    """The front of a partition, for one engine."""

    first: Head | None = None
    """None: it has nothing that the engine may take."""
    fitting: Head | None = None
    """The first one of at most `room` tokens, where `first` has more."""
    room: int = 0
    ripens_s: float = math.inf
    """Seconds until the engine may take something that is left to other engines until then."""


class Take(NamedTuple):
    """A claim to send: at most so much of a partition, and nothing after `bound`."""

    number: int
    max_requests: int
    max_tokens: int
    bound: int | None
    """The greatest key to claim; None for any."""


@dataclass
class _Known:
    heads: Heads
    asked_at: float
    is_own: bool


@dataclass
class ClaimOrder:
    """What is known of the partitions' heads, and what follows for the next claim."""

    _known: dict[int, _Known] = field(default_factory=dict)
    _rang_at: dict[int, float] = field(default_factory=dict)
    _away_until: dict[int, float] = field(default_factory=dict)

    def ring(self, number: int, now: float) -> None:
        """Note that a partition may have got an earlier head."""
        self._rang_at[number] = now

    def forget(self) -> None:
        """Know nothing: messages may have been missed, or the engine may take other entries than before."""
        self._known.clear()
        self._away_until.clear()

    def learn(self, number: int, heads: Heads, asked_at: float, *, is_own: bool) -> None:
        """Keep a partition's heads. `asked_at`: when the question was sent; a later ring asks again."""
        self._known[number] = _Known(heads, asked_at, is_own)
        self._away_until.pop(number, None)

    def note_away(self, number: int, now: float) -> None:
        """Leave a partition out for a while: its node does not answer."""
        self._known.pop(number, None)
        self._away_until[number] = now + AWAY_S

    def present(self, numbers: Collection[int], now: float) -> list[int]:
        """Return those of some partitions, in order, whose nodes are not left out because they did not answer."""
        return [number for number in sorted(numbers) if self._away_until.get(number, -math.inf) <= now]

    def to_ask(self, count: int, own: Collection[int], now: float) -> list[int]:
        """Return which of the partitions 0 to count - 1 have to be asked for their heads before a claim."""
        limit = now - max(REFRESH_S, REFRESH_EACH_S * count)
        wanted, old = [], []
        for number in range(count):
            known = self._known.get(number)
            if known is None:
                if self._away_until.get(number, -math.inf) <= now:
                    wanted.append(number)
            elif self._has_changed(number, known, now) or known.is_own != (number in own):
                wanted.append(number)
            elif known.asked_at <= limit:
                old.append(number)
        old.sort(key=lambda number: self._known[number].asked_at)
        return wanted + old[:REFRESH_AT_ONCE]

    def lone(self, count: int, own: Collection[int], now: float) -> int | None:
        """Return the one of the partitions 0 to count - 1 that may have something, where all others are known to have
        nothing: whatever it has is next.
        """
        found = None
        for number in range(count):
            if self._may_have_now(number, own, now) and self._away_until.get(number, -math.inf) <= now:
                if found is not None:
                    return None
                found = number
        return found

    def may_have(self, numbers: Collection[int]) -> bool:
        """Return whether any of some partitions may have something that the engine may take, as far as it is known."""
        return any(self._may_have(number) for number in numbers)

    def _may_have_now(self, number: int, own: Collection[int], now: float) -> bool:
        """Likewise, by what has changed since it was asked, too: what was left to others may be this engine's now."""
        known = self._known.get(number)
        changed = known is not None and (self._has_changed(number, known, now) or known.is_own != (number in own))
        return changed or self._may_have(number)

    def _may_have(self, number: int) -> bool:
        known = self._known.get(number)
        return known is None or known.heads.first is not None or self._rang_at.get(number, -math.inf) >= known.asked_at

    def unsure(self, room: int) -> list[int]:
        """Return the partitions whose first head is too large, and that were asked for what fits into other room."""
        return [number for number, known in self._known.items() if self._is_unsure(known.heads, room)]

    def foremost(self, count: int, room: int) -> list[int]:
        """Return the `count` partitions with the smallest known keys: those that other engines claim from as well."""
        return [number for _, number in sorted(self._ready(room))[:count]]

    def takes(self, max_requests: int, max_tokens: int, own: Collection[int]) -> list[Take]:
        """Return the claims to send next, at once; [] where nothing is left that fits.

        They share the given room. Each is bounded, so that all of them together take nothing more than SLACK_MS before
        its turn, and nothing that would overtake a head for which this engine keeps its room.
        """
        limit = self._reserved(own, max_tokens)
        ready = [(key, number) for key, number in sorted(self._ready(max_tokens)) if limit is None or key < limit]
        if not ready:
            return []
        first_after = ready[0][0] + SLACK_MS
        near = [number for key, number in ready if key <= first_after]
        bounds = [] if limit is None else [limit - 1]
        if len(near) > 1:
            bounds.append(first_after)
        elif len(ready) > 1:  # until the next partition's turn
            bounds.append(ready[1][0] + SLACK_MS)
        bound = min(bounds, default=None)
        near.sort(key=lambda number: number not in own)
        return self._shares(near[:max_requests], max_requests, max_tokens, bound)

    def reserves(self, own: Collection[int], room: int) -> bool:
        """Return whether this engine keeps its room for a head that does not fit into it."""
        return self._reserved(own, room) is not None

    def _shares(self, numbers: Sequence[int], max_requests: int, max_tokens: int, bound: int | None) -> list[Take]:
        """Divide the room: each partition gets what its head needs, then all get an equal part of the rest."""
        fitting: list[tuple[int, int]] = []
        rest = max_tokens
        for number in numbers:
            head = self._head(self._known[number].heads, max_tokens)
            tokens = head.tokens if head is not None else 0
            if tokens <= rest:
                fitting.append((number, tokens))
                rest -= tokens
        count = max(1, len(fitting))
        return [
            Take(number, max_requests // count + (place < max_requests % count), tokens + rest // count, bound)
            for place, (number, tokens) in enumerate(fitting)
        ]

    def _has_changed(self, number: int, known: _Known, now: float) -> bool:
        age = now - known.asked_at
        has_rung = self._rang_at.get(number, -math.inf) >= known.asked_at
        return age >= known.heads.ripens_s or (has_rung and (known.heads.first is None or age >= LOOK_PAUSE_S))

    @staticmethod
    def _is_unsure(heads: Heads, room: int) -> bool:
        if heads.first is None or heads.first.tokens <= room:
            return False
        if heads.first.tokens <= heads.room or heads.room < room:
            return True  # what is behind it was not looked for, or in less room
        return heads.fitting is not None and heads.fitting.tokens > room

    def _ready(self, room: int) -> Iterable[tuple[int, int]]:
        for number, known in self._known.items():
            head = self._head(known.heads, room)
            if head is not None:
                yield head.key, number

    def _reserved(self, own: Collection[int], room: int) -> int | None:
        """Return the smallest key of an own partition's head that is too large and must not be overtaken."""
        firsts = (known.heads.first for number, known in self._known.items() if number in own)
        return min((first.key for first in firsts if first and first.stays and first.tokens > room), default=None)

    @staticmethod
    def _head(heads: Heads, room: int) -> Head | None:
        if heads.first is None or heads.first.tokens <= room:
            return heads.first
        return heads.fitting if heads.fitting is not None and heads.fitting.tokens <= room else None


class Doorbell:
    """Passes rings on to the claim order, those of other engines' partitions after a delay."""

    def __init__(self, order: ClaimOrder, delay_s: float) -> None:
        """`delay_s`: seconds until another engine's partition rings."""
        self._order = order
        self._delay = delay_s
        self._rung = asyncio.Event()
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def ring(self, partition: int, *, at_once: bool) -> None:
        """Note that a partition has got work: at once where it is this engine's own, else after the delay."""
        if at_once:
            self._ring_now(partition)
        else:
            self.ring_in(partition, self._delay)

    def ring_in(self, partition: int, delay_s: float) -> None:
        """Ring for a partition after a delay, or sooner where a ring is due already. inf: not at all."""
        if math.isinf(delay_s):
            return
        loop = asyncio.get_running_loop()
        due = self._timers.get(partition)
        if due is not None and due.when() <= loop.time() + delay_s:
            return  # the reply to that ring's question names what is still left to others
        if due is not None:
            due.cancel()
        self._timers[partition] = loop.call_later(delay_s, self._ring_now, partition)

    def ring_all(self) -> None:
        """Note that messages may have been missed: every partition may have work."""
        self._order.forget()
        self._rung.set()

    def look_again(self) -> None:
        """End `wait`: a claim found something, so there may be more."""
        self._rung.set()

    def answer(self) -> None:
        """Let `wait` wait for the next ring: a claim begins."""
        self._rung.clear()

    async def wait(self, timeout_s: float) -> None:
        """Wait for a ring since the last `answer`, at most `timeout_s` seconds."""
        await wait_for_event(self._rung, timeout_s)

    def close(self) -> None:
        """Cancel delayed rings."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _ring_now(self, partition: int) -> None:
        self._timers.pop(partition, None)
        self._order.ring(partition, time.monotonic())
        self._rung.set()
