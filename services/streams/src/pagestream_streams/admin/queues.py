"""Queue depth, age and drain rate, equal for every process that asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.connection.scripts import QUEUE

_MAX_SAMPLED_ENTRIES = 64  # entries of a queue of begun requests whose tokens are counted; the rest is extrapolated
_SHORTEST_SPAN_S = 1.0  # shorter spans give no meaningful rate


@dataclass(frozen=True)
class QueueDepth:
    """One queue of one partition."""

    queue: str
    """A priority class, "resume" (begun requests) or "suspect" (docs/decisions/0024)."""
    requests: int
    tokens: int
    """Of prompts, and those that begun requests have generated."""
    oldest_s: float
    """Seconds that its oldest request has waited; 0 for none."""


@dataclass(frozen=True)
class QueueState:
    """One partition of a model."""

    partition: int
    waiting: tuple[QueueDepth, ...]
    running: int
    """Requests that engines own."""
    drain_rate: float
    """Prompt tokens a second that engines claimed for the first time, over settings.drain_window_ms."""


async def queue_states(broker: Broker) -> dict[str, list[QueueState]]:
    """Return the state of every partition by model name, read in one round trip. Unavailable."""
    directory = broker.directory
    names = await directory.names()
    partitions = [where for name in names for where in await directory.all_partitions(name)]
    arguments = broker.settings.drain_window_ms, _MAX_SAMPLED_ENTRIES
    replies = await broker.connection.run_many([Call(QUEUE, where.prefix, arguments) for where in partitions])
    states: dict[str, list[QueueState]] = {name: [] for name in names}
    for where, reply in zip(partitions, replies, strict=True):
        states[where.model].append(_state(where.number, reply))
    return states


def _state(partition: int, reply: Any) -> QueueState:
    running, drained, window_ms, *rows = reply
    waiting = tuple(QueueDepth(name.decode(), requests, tokens, age / 1000) for name, requests, tokens, age in rows)
    rate = drained / max(window_ms / 1000, _SHORTEST_SPAN_S)
    return QueueState(partition, waiting, running, rate)
