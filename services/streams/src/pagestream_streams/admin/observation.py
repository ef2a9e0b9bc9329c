"""What is read for people and scalers who look on: queues, engines' loads, models, block maps, and Redis' memory.

The figures of queues are equal for every process that asks. Maps of engines' KV blocks are published while somebody
says that he wants to see them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from pagestream.v1.records_pb2 import BlockMap
from redis import exceptions

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.records import CONTEXT_FIELD, FINGERPRINT_FIELD
from pagestream_streams.scripts import QUEUE, REGISTRY

_MAX_SAMPLED_ENTRIES = 32  # entries of a queue that are looked at; the rest is extrapolated
_CLASSES = ("0", "1", "2")
_SHORTEST_SPAN_S = 1.0  # shorter spans give no meaningful rate


@dataclass(frozen=True)
class QueueDepth:
    """One queue of one partition."""

    queue: str
    """A priority class, "resume" (begun requests) or "suspect" (docs/design/fencing.md)."""
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
    """Output tokens that are expected of them; 0 for begun requests."""
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


_FIELDS = ("running", "waiting", "kv_utilization", CONTEXT_FIELD)


@dataclass(frozen=True)
class EngineLoad:
    """An engine's load at its last heartbeat."""

    engine_id: str
    running: int | None
    """Sequences that hold KV blocks; None where the engine has published nothing yet, as are the others."""
    waiting: int | None
    """Sequences that wait inside the engine."""
    kv_utilization: float | None
    """Referenced blocks / all blocks."""
    max_model_len: int | None
    """Longest context in tokens; 0 for any."""


async def read_engine_loads(broker: Broker, models: Sequence[str]) -> dict[str, list[EngineLoad]]:
    """Return the living engines of each model, ordered by their ids, in two round trips. Unavailable."""
    connection, keyspace = broker.connection, broker.connection.keyspace
    found = await connection.run_many([Call(REGISTRY, keyspace.engines(name), ("", 0)) for name in models])
    ids = [sorted(each.decode() for each in living) for living in found]
    commands = [("HMGET", keyspace.engine(each), *_FIELDS) for living in ids for each in living]
    loads = iter(await connection.pipeline(commands) if commands else [])
    return {name: [_load(each, next(loads)) for each in living] for name, living in zip(models, ids, strict=True)}


def _load(engine_id: str, values: Sequence[bytes | None]) -> EngineLoad:
    running, waiting, utilization, context = values
    return EngineLoad(
        engine_id,
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        None if utilization is None else float(utilization),
        None if context is None else int(context),
    )


@dataclass(frozen=True)
class QueueRow:
    """A queue of a model, over all partitions."""

    name: str
    """A priority class, "resume" or "suspect"."""
    requests: int
    tokens: int
    """Of their prompts."""
    oldest_s: float
    drain_rate: float
    """Prompt tokens a second that engines take from it."""


@dataclass(frozen=True)
class ModelRow:
    """A model."""

    name: str
    running: int
    """Requests that engines have claimed."""
    engines: Sequence[EngineLoad]
    queues: Sequence[QueueRow]


async def read_models(broker: Broker, only: Collection[str] | None = None) -> list[ModelRow]:
    """Return the models by name, in a few round trips. Unavailable.

    `only`: names of the models to read; None for all.
    """
    states = await queue_states(broker, only)
    loads = await read_engine_loads(broker, list(states))
    return [
        ModelRow(name, sum(each.running for each in found), loads[name], _queues(found))
        for name, found in sorted(states.items())
    ]


def _queues(states: Sequence[QueueState]) -> list[QueueRow]:
    names = sorted({each.queue for state in states for each in state.waiting})
    rows = []
    for name in names:
        parts = [each for state in states for each in state.waiting if each.queue == name]
        oldest_s = max(each.oldest_s for each in parts)
        drain_rate = sum(each.drain_rate for each in parts)
        rows.append(
            QueueRow(name, sum(p.requests for p in parts), sum(p.tokens for p in parts), round(oldest_s, 3), drain_rate)
        )
    return rows


_log = logging.getLogger(__name__)

WATCHED_MS = 5_000
"""For which a model counts as watched after the last look."""
KEPT_MS = 3_000
"""For which a map is kept: a dead engine's is gone soon."""
MOST_BYTES = 64 << 10
"""Of a map; a larger one is not published."""


class BlockMaps:
    """The maps of one deployment, in Redis. Every method raises Unavailable."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._keyspace = connection.keyspace

    # -- for who looks --

    async def watch(self, models: Sequence[str], engine_ids: Sequence[str]) -> list[BlockMap | None]:
        """Ask the engines of models for maps, for the next WATCHED_MS; return those that there are now.

        Returns:
            The map of each engine; None where it has published none yet, or one that this version can't read.
        """
        asks = [("SET", self._keyspace.watched(model), 1, "PX", WATCHED_MS) for model in models]
        reads = [("GET", self._keyspace.block_map(each)) for each in engine_ids]
        replies = await self._connection.pipeline([*asks, *reads])
        return [_parsed(each) for each in replies[len(asks) :]]

    # -- for engines --

    async def is_watched(self, model: str) -> bool:
        """Return whether somebody looks at a model's engines."""
        return await self._connection.execute("GET", self._keyspace.watched(model)) is not None

    async def publish(self, engine_id: str, block_map: BlockMap) -> None:
        """Publish an engine's map."""
        data = block_map.SerializeToString()
        if len(data) > MOST_BYTES:
            _log.warning("a map of %d bytes is not published: at most %d are", len(data), MOST_BYTES)
            return
        await self._connection.execute("SET", self._keyspace.block_map(engine_id), data, "PX", KEPT_MS)


def _parsed(data: bytes | None) -> BlockMap | None:
    if data is None:
        return None
    try:
        return BlockMap.FromString(data)
    except DecodeError:
        _log.warning("a map of %d bytes can't be read", len(data))
        return None


class MemoryUse(NamedTuple):
    """The memory of the fullest server, in bytes."""

    used: int
    """What counts for the limit: without the buffers of replicas and of the append-only file."""
    limit: int
    """maxmemory; 0 for none."""

    @property
    def is_full(self) -> bool:
        """Whether Redis refuses what needs memory."""
        return 0 < self.limit < self.used

    @property
    def share(self) -> float:
        """Used / limit; 0 without a limit."""
        return self.used / self.limit if self.limit else 0.0


async def memory_use(connection: Connection) -> MemoryUse:
    """Return the memory of the server, or of a cluster's fullest master. Unavailable where one does not answer."""
    uses = []
    for fields in await connection.execute_on_each("INFO", "memory"):
        used = int(fields["used_memory"]) - int(fields.get("mem_not_counted_for_evict", 0))
        uses.append(MemoryUse(used, int(fields.get("maxmemory", 0))))
    return max(uses, key=lambda use: (use.share, use.used))


async def entry_size(connection: Connection, logs: Sequence[str]) -> float | None:
    """Return the bytes of memory for each entry of these logs; None where they have none. Unavailable."""
    try:
        replies = await connection.pipeline([command for log in logs for command in _measures(log)])
    except exceptions.ResponseError as error:
        raise Unavailable(f"Redis does not tell the size of a log: {error}") from error
    sizes, lengths = replies[::2], replies[1::2]
    total = sum(length for size, length in zip(sizes, lengths, strict=True) if size is not None)
    return sum(size for size in sizes if size is not None) / total if total else None


def _measures(log: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ("MEMORY", "USAGE", log), ("XLEN", log)
