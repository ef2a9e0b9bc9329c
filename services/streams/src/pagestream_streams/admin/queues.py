"""How much waits, and how fast it is claimed: the same truth for every process that asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.connection.scripts import QUEUE

_MOST_LOOKED_AT = 64  # entries of a queue of resumed requests; more are taken to be like them
_SHORTEST_SPAN_S = 1.0  # a rate over less is chance


@dataclass(frozen=True)
class Waiting:
    """One queue of one partition."""

    queue: str  # a priority class, "resume" (goes on after another engine) or "suspect" (see docs/decisions/0024)
    requests: int
    tokens: int  # of prompts, and what resumed requests have generated
    oldest_s: float  # how long its oldest has waited; 0 where none does


@dataclass(frozen=True)
class QueueState:
    """One partition of a model."""

    partition: int
    waiting: tuple[Waiting, ...]
    running: int  # requests that engines own
    drain_rate: float  # prompt tokens a second that engines claimed for the first time, over settings.drain_window_ms


async def queue_states(broker: Broker) -> dict[str, list[QueueState]]:
    """The partitions of every model, by its name: one script for each in one round trip. Unavailable."""
    directory = broker.directory
    names = await directory.names()
    partitions = [where for name in names for where in await directory.all_partitions(name)]
    arguments = broker.settings.drain_window_ms, _MOST_LOOKED_AT
    replies = await broker.connection.run_many([Call(QUEUE, where.prefix, arguments) for where in partitions])
    states: dict[str, list[QueueState]] = {name: [] for name in names}
    for where, reply in zip(partitions, replies, strict=True):
        states[where.model].append(_state(where.number, reply))
    return states


def _state(partition: int, reply: Any) -> QueueState:
    running, drained, window_ms, *rows = reply
    waiting = tuple(Waiting(name.decode(), requests, tokens, age / 1000) for name, requests, tokens, age in rows)
    rate = drained / max(window_ms / 1000, _SHORTEST_SPAN_S)
    return QueueState(partition, waiting, running, rate)
