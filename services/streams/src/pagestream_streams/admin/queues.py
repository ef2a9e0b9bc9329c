"""Queue depth, age and drain rate, equal for every process that asks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.protocol.records import CONTEXT_FIELD, FINGERPRINT_FIELD
from pagestream_streams.scripts import QUEUE, REGISTRY

_MAX_SAMPLED_ENTRIES = 32  # entries of a queue that are looked at; the rest is extrapolated
_CLASSES = ("0", "1", "2")
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
    takeable_tokens: int
    """Tokens of what a living engine may take now, by context and fingerprint; all of them where no engine lives."""
    takeable_oldest_s: float
    """Seconds for which the oldest of these could have been taken."""
    takeable_longest: int
    """Tokens of the largest of these, as far as the front of the queue shows."""
    takeable_output_tokens: int
    """Output tokens that are expected of them, see protocol/expected_lengths.py; 0 for begun requests."""
    drain_rate: float
    """Prompt tokens a second that engines claimed from it, over settings.drain_window_ms."""


@dataclass(frozen=True)
class TenantQueue:
    """What waits of one tenant's requests in one class of a model; begun requests are counted no more."""

    model: str
    tenant: str
    queue: str
    """The priority class."""
    requests: int
    tokens: int
    """Of their prompts."""


@dataclass(frozen=True)
class QueueState:
    """One partition of a model."""

    partition: int
    waiting: tuple[QueueDepth, ...]
    running: int
    """Requests that engines own."""
    drain_rate: float
    """Prompt tokens a second that engines claimed for the first time, over settings.drain_window_ms."""
    drain_longest_rate: float
    """The part of it that the largest request makes up."""


@dataclass(frozen=True)
class _Living:
    """What the living engines of a model hold, as the script's arguments."""

    context: str = ""
    """The longest context; "" for any, or where no engine lives."""
    fingerprints: str = ""
    """Between spaces; "" for any, or where no engine lives."""


async def queue_states(broker: Broker, only: Collection[str] | None = None) -> dict[str, list[QueueState]]:
    """Return the state of every partition by model name, read in a few round trips. Unavailable.

    `only`: names of the models to read, of those that are published; None for all.
    """
    directory, settings = broker.directory, broker.settings
    names = [name for name in await directory.names() if only is None or name in only]
    partitions = [where for name in names for where in await directory.all_partitions(name)]
    living = await _read_living(broker, names)
    calls = [
        Call(
            QUEUE,
            where.prefix,
            (
                settings.drain_window_ms,
                _MAX_SAMPLED_ENTRIES,
                settings.fingerprint_grace_ms,
                living[where.model].context,
                living[where.model].fingerprints,
            ),
        )
        for where in partitions
    ]
    replies = await broker.connection.run_many(calls)
    states: dict[str, list[QueueState]] = {name: [] for name in names}
    for where, reply in zip(partitions, replies, strict=True):
        states[where.model].append(_state(where.number, reply))
    return states


async def tenant_queues(broker: Broker) -> list[TenantQueue]:
    """Return what waits, ordered by model, class and tenant: one command for each partition and class. Unavailable."""
    places = [
        (model, name, f"{where.prefix}tenants:{name}")
        for model in await broker.directory.names()
        for where in await broker.directory.all_partitions(model)
        for name in _CLASSES
    ]
    replies = await broker.connection.pipeline([("HGETALL", key) for *_, key in places]) if places else []
    requests: dict[tuple[str, str, str], int] = {}
    tokens: dict[tuple[str, str, str], int] = {}
    for (model, name, _), reply in zip(places, replies, strict=True):
        for field, number in ((name.decode(), int(value)) for name, value in reply.items()):
            sums = {"r": requests, "t": tokens}.get(field[:1])
            if sums is not None:
                row = model, name, field[1:]
                sums[row] = sums.get(row, 0) + number
    return [
        TenantQueue(model, tenant, name, number, tokens.get((model, name, tenant), 0))
        for (model, name, tenant), number in sorted(requests.items())
    ]


async def _read_living(broker: Broker, names: Sequence[str]) -> dict[str, _Living]:
    connection = broker.connection
    keyspace = connection.keyspace
    engines = await connection.run_many([Call(REGISTRY, keyspace.engines(name), ("", 0)) for name in names])
    ids = [engine.decode() for found in engines for engine in found]
    fields = ("HMGET", FINGERPRINT_FIELD, CONTEXT_FIELD)
    known = await connection.pipeline([(fields[0], keyspace.engine(each), *fields[1:]) for each in ids]) if ids else []
    held = iter(known)
    return {name: _living([next(held) for _ in found]) for name, found in zip(names, engines, strict=True)}


def _living(engines: Sequence[Sequence[bytes | None]]) -> _Living:
    """Combine what engines have published; one that hasn't may take anything."""
    prints, contexts = {each for each, _ in engines}, {each for _, each in engines}
    any_print = not engines or bool(prints & {None, b""})
    any_context = not engines or bool(contexts & {None, b"", b"0"})
    return _Living(
        context="" if any_context else str(max(int(each) for each in contexts if each)),
        fingerprints="" if any_print else f" {' '.join(sorted(each.decode() for each in prints if each))} ",
    )


def _state(partition: int, reply: Any) -> QueueState:
    running, drained, window_ms, longest, *rows = reply
    span_s = max(window_ms / 1000, _SHORTEST_SPAN_S)
    waiting = tuple(
        QueueDepth(
            queue=name.decode(),
            requests=requests,
            tokens=tokens,
            oldest_s=oldest_ms / 1000,
            takeable_tokens=takeable,
            takeable_oldest_s=takeable_ms / 1000,
            takeable_longest=takeable_longest,
            takeable_output_tokens=outputs,
            drain_rate=claimed / span_s,
        )
        for name, requests, tokens, oldest_ms, takeable, takeable_ms, takeable_longest, claimed, outputs in rows
    )
    return QueueState(partition, waiting, running, drained / span_s, longest / span_s)
