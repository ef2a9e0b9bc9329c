"""How many requests go before a queued one over all partitions of its model, and how long that may take.

Both come from an outline of the model's queues that all callers of a process share for a while (docs/design/queueing).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagestream_streams.admin.directory import ModelDirectory
from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.errors import ModelNotFound, Unavailable
from pagestream_streams.scripts import OUTLINE, REGISTRY
from pagestream_streams.settings import StreamsSettings

SHARED_S = 0.001
"""Seconds for each partition that an outline is used: callers cost Redis one script a millisecond, at most."""
SAMPLED = 1024
"""Entries of an outline: about as many are read from either end of each queue, divided by the partitions."""
_LEAST_SAMPLED, _MOST_SAMPLED = 4, 64  # from either end of one queue
_SHORTEST_SPAN_S = 1.0  # shorter spans give no meaningful rate
_BEGUN = 10**13  # as in prelude.lua
_WHATEVER_CLASS = 2  # outline.lua's reply where the classes do not count


class EntryId(NamedTuple):
    """The id of an entry: its arrival in ms, and a number among those of the same millisecond."""

    ms: int
    number: int

    @classmethod
    def parse(cls, text: bytes) -> EntryId:
        """Read "<ms>-<number>"."""
        ms, _, number = text.partition(b"-")
        return cls(int(ms), int(number))


class QueuePosition(NamedTuple):
    """What goes before a request."""

    requests: int
    wait_ms: int | None
    """The tokens before it by the measured drain rate; None where nothing drains or no engine lives."""


@dataclass(frozen=True)
class QueueOutline:
    """One queue of one partition: its length, and entries from both ends, each with its tokens."""

    name: str
    requests: int
    tokens: int
    first: Sequence[tuple[EntryId, int]]
    last: Sequence[tuple[EntryId, int]]
    """The last one first; () where `first` has them all."""

    def before(self, limit: EntryId) -> tuple[float, float]:
        """Return the requests and tokens that arrived before a time.

        Exact where that lies among the known entries; between them as if the rest had arrived evenly.
        """
        if not self.last or limit <= self.first[-1][0]:
            early = [tokens for entry, tokens in self.first if entry < limit]
            return len(early), sum(early)
        if limit > self.last[-1][0]:
            late = [tokens for entry, tokens in self.last if entry >= limit]
            return self.requests - len(late), self.tokens - sum(late)
        start, end = self.first[-1][0].ms, self.last[-1][0].ms
        part = (limit.ms - start) / max(1, end - start)
        known = sum(tokens for _, tokens in self.first), sum(tokens for _, tokens in self.last)
        between = max(0, self.requests - len(self.first) - len(self.last))
        return len(self.first) + part * between, known[0] + part * max(0, self.tokens - sum(known))


@dataclass(frozen=True)
class Outline:
    """The queues of a model."""

    queues: Sequence[QueueOutline]
    drain_rate: float
    """Prompt tokens a second."""
    has_engines: bool
    order: int = 0
    """Of classes: 0 by arrival, 1 by ranks, 2 by ranks whatever the class (docs/design/queueing.md)."""

    def position_of(self, queue: str, entry: EntryId, ageing_ms: int, rank: int | None = None) -> QueuePosition | None:
        """Return what goes before an entry of a queue, by the order of docs/design/queueing; None where its rank counts
        and is unknown: it was accepted under another policy.
        """
        if self.order and queue.isdigit():
            if rank is None:
                return None
            entry = EntryId(rank, 0)
        ageing_ms = 0 if self.order == _WHATEVER_CLASS else ageing_ms
        key = entry.ms + _shift(queue, ageing_ms)
        found = [each.before(EntryId(key - _shift(each.name, ageing_ms), entry.number)) for each in self.queues]
        requests, tokens = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
        is_known = self.has_engines and self.drain_rate > 0
        return QueuePosition(round(requests), round(tokens / self.drain_rate * 1000) if is_known else None)


class QueuePositions:
    """Positions of queued requests, for one process."""

    def __init__(self, connection: Connection, settings: StreamsSettings, directory: ModelDirectory) -> None:
        """Create it without outlines."""
        self._connection = connection
        self._settings = settings
        self._directory = directory
        self._outlines: dict[str, tuple[float, Outline | None]] = {}
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def position_of(
        self, model: str, queue: str, entry: EntryId, rank: int | None = None
    ) -> QueuePosition | None:
        """Return what goes before a queued request, of that rank if it has one; None where a part of the queue can't be
        read now.
        """
        async with self._reading[model]:
            until, outline = self._outlines.get(model, (float("-inf"), None))
            if time.monotonic() >= until:
                outline, count = await self._read(model)
                self._outlines[model] = time.monotonic() + count * SHARED_S, outline
        return outline.position_of(queue, entry, self._settings.ageing_ms, rank) if outline is not None else None

    async def _read(self, model: str) -> tuple[Outline | None, int]:
        settings = self._settings
        try:
            partitions = await self._directory.all_partitions(model)
        except ModelNotFound:
            return None, 0
        sampled = min(_MOST_SAMPLED, max(_LEAST_SAMPLED, SAMPLED // len(partitions)))
        calls = [Call(OUTLINE, where.prefix, (sampled, settings.drain_window_ms)) for where in partitions]
        engines = Call(REGISTRY, self._connection.keyspace.engines(model), ("", 0))
        try:
            living, *replies = await self._connection.run_each([engines, *calls], settings.beat_limit_s)
        except Unavailable:  # none of them in time; whoever asked reads the request all the same
            return None, len(partitions)
        if any(isinstance(each, Unavailable) for each in (living, *replies)):
            return None, len(partitions)
        rate = sum(drained / max(span_ms / 1000, _SHORTEST_SPAN_S) for drained, span_ms, *_ in replies)
        queues = [_queue(row) for _, _, _, *rows in replies for row in rows]
        return Outline(queues, rate, bool(living), max(order for _, _, order, *_ in replies)), len(partitions)


def _queue(row: Any) -> QueueOutline:
    name, requests, tokens, first, last = row
    ends = [
        [(EntryId.parse(entry), each) for entry, each in zip(values[::2], values[1::2], strict=True)]
        for values in (first, last)
    ]
    if tokens < 0:
        seen = [each for _, each in [*ends[0], *ends[1]]]
        tokens = round(sum(seen) / len(seen) * requests)
    return QueueOutline(name.decode(), requests, tokens, ends[0], ends[1])


def _shift(queue: str, ageing_ms: int) -> int:
    """Return what order_key in prelude.lua adds to an arrival."""
    return int(queue) * ageing_ms if queue.isdigit() else -_BEGUN
