"""One process' access to Redis: its connections, the models, and what can be done to a request from outside.

The list of a tenant's requests is a key of its own, so it is written beside `accept`, not with it: a request whose
gateway dies in between is served and not listed. What a listed request shows is read from its record, and a request
without one is not shown. Quarantined requests are listed by model, and requeued by an administrator who trusts them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from pagestream.v1.inference_pb2 import (
    ON_DISCONNECT_CONTINUE,
    REQUEST_STATE_FINISHED,
    REQUEST_STATE_QUEUED,
    REQUEST_STATE_RUNNING,
    FinishReason,
    RequestState,
    Usage,
)
from pagestream.v1.records_pb2 import LogSlice, ModelCard, RequestSpec

from pagestream_streams.admin.adapters import AdapterDirectory
from pagestream_streams.admin.directory import ModelDirectory
from pagestream_streams.admin.engine_models import EngineModels
from pagestream_streams.admin.queue_positions import EntryId, QueuePosition, QueuePositions
from pagestream_streams.connection.connection import Call, Connection, publish_wake_ups, wake_up_message
from pagestream_streams.errors import ModelNotFound, RequestNotFound, Unavailable
from pagestream_streams.protocol.keys import DEFAULT_PARTITIONS, Partition, new_request_id
from pagestream_streams.protocol.records import (
    POISON_S,
    ModelInfo,
    QuarantinedRequest,
    RequestSummary,
    RequestView,
    equality_digest,
    parse_finish_reason,
)
from pagestream_streams.scripts import DELIST, DISCARD, END, ENLIST, EXPIRE, FREE_KEY, REVIVE, VIEW
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import within

STATES: dict[bytes, RequestState] = {
    b"queued": REQUEST_STATE_QUEUED,
    b"running": REQUEST_STATE_RUNNING,
    b"finished": REQUEST_STATE_FINISHED,
}
"""By the word that a request's record has."""
_MOST_POISON = 256  # of a model
DISCARDED_KEPT_S = 60
"""For those who read a discarded request's log, a gateway that has just restarted among them."""


class Broker:
    """Created by `Broker.connect`, closed by `close` or `async with`. Sessions use it and are closed before it."""

    def __init__(self, connection: Connection, settings: StreamsSettings) -> None:
        """Use an open connection; `connect` opens one."""
        self.connection = connection
        self.settings = settings
        self.directory = ModelDirectory(connection, settings)
        self.adapters = AdapterDirectory(connection, settings)
        """LoRA adapters, which requests name in place of their model."""
        self.engine_models = EngineModels(connection)
        """Engines that change their models."""
        self.positions = QueuePositions(connection, settings, self.directory)
        self.end_listeners: list[Callable[[str, str], None]] = []
        """Called with tenant and id of each request that `end_request` has ended, or found to have ended before."""

    @classmethod
    async def connect(cls, url: str, settings: StreamsSettings | None = None) -> Broker:
        """Open the connection to a server.

        Args:
            url: its address, see connection.topologies.open_topology.
            settings: None for the defaults. All processes of a deployment should use the same.

        Raises:
            Unavailable: no server has answered within settings.connect_timeout_s.
            ValueError: the address is malformed.
        """
        settings = settings or StreamsSettings()
        connection = Connection(url, settings)
        try:
            await connection.open()
        except BaseException:
            await connection.close()
            raise
        return cls(connection, settings)

    async def close(self) -> None:
        """Close all connections."""
        await self.connection.close()

    async def __aenter__(self) -> Self:
        """Return the broker, which is open already."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the broker."""
        await self.close()

    async def ping(self) -> None:
        """Raise Unavailable if Redis doesn't answer."""
        await self.connection.execute("PING")

    async def publish_model(self, card: ModelCard, *, partitions: int = DEFAULT_PARTITIONS) -> None:
        """Store a model's card, so that gateways know the model even when no engine runs.

        Args:
            card: replaces the model's card. Where engines live that hold another context, it counts as one of them:
                what is stored has the longest, and the one that most of them hold.
            partitions: number of partitions of a new model; an existing model keeps its own.

        Raises:
            ModelNameRefused: the name can't be part of a key, or has the same tag as another model's.
            Unavailable: a retry is harmless.
        """
        await self.directory.publish(card, partitions)

    async def models(self) -> list[ModelInfo]:
        """Return all models, sorted by name. Unavailable."""
        return await self.directory.infos()

    async def view(self, request_id: str, tenant: str, *, with_position: bool = True) -> RequestView:
        """Return where a request stands. RequestNotFound, also for other tenants' and malformed ids; Unavailable.

        `with_position`: whether to read the model's queues for the place of a request that waits in them.
        """
        where = await self.directory.locate(request_id)
        found = await self.connection.run(VIEW, where.prefix, request_id, tenant)
        if found is None:
            raise RequestNotFound(request_id)
        spec, state, reason, next_index, digest, prompt, completion, cached, attempts, *found = found
        queue, entry, print_, rank, discarded = found
        position = (
            await self._queue_position(where.model, state, queue, entry, rank) if with_position or not queue else None
        )
        return RequestView(
            request_id=request_id,
            model=where.model,
            tenant=tenant,
            state=STATES[state],
            queue_position=None if position is None else position.requests,
            expected_wait_ms=None if position is None else position.wait_ms,
            finish_reason=parse_finish_reason(reason.decode()),
            next_index=int(next_index),
            digest=digest.decode(),
            usage=Usage(prompt_tokens=int(prompt), completion_tokens=int(completion), cached_tokens=int(cached)),
            attempts=int(attempts),
            spec=RequestSpec.FromString(spec),
            fingerprint=print_.decode(),
            is_discarded=discarded == b"1",
        )

    async def queue_position(self, request_id: str, tenant: str) -> QueuePosition | None:
        """Return what goes before a queued request: one short command, and an outline that callers share. Unavailable.

        None where it does not wait in a queue, is not the tenant's, or a part of the queue can't be read now.
        """
        where = await self.directory.locate(request_id)
        fields = "tenant", "state", "queue", "entry", "rank"
        owner, *found = await self.connection.execute("HMGET", where.request(request_id), *fields)
        state, _, entry, _ = found
        waits = owner == tenant.encode() and (entry or state == b"queued")
        return await self._queue_position(where.model, *found) if waits else None

    async def _queue_position(
        self, model: str, state: bytes, queue: bytes | None, entry: bytes | None, rank: bytes | None
    ) -> QueuePosition | None:
        if queue and entry:
            known_rank = int(rank) if rank else None
            return await self.positions.position_of(model, queue.decode(), EntryId.parse(entry), known_rank)
        return (
            QueuePosition(0, None) if state == b"queued" else None
        )  # a suspect waits for an idle engine, before all queues

    async def spec(self, request_id: str, tenant: str) -> RequestSpec:
        """Return a request as it was accepted. RequestNotFound, Unavailable."""
        return (await self.view(request_id, tenant, with_position=False)).spec

    async def fingerprint(self, request_id: str, tenant: str) -> str:
        """Return the fingerprint of the engine that claimed a request last; "" where none has. Unavailable."""
        where = await self.directory.locate(request_id)
        owner, found = await self.connection.execute("HMGET", where.request(request_id), "tenant", "print")
        return found.decode() if found is not None and owner == tenant.encode() else ""

    async def cancel(self, request_id: str, tenant: str) -> FinishReason:
        """End a request in whatever state it is, also without any engine. RequestNotFound, Unavailable.

        Returns:
            How it ended: CANCELLED, or as it had finished before.
        """
        where = await self.directory.locate(request_id)
        reason = await self.end_request(where, request_id, "cancelled", tenant=tenant)
        if reason is None:
            raise RequestNotFound(request_id)
        return reason

    async def quarantined(self, model: str) -> list[QuarantinedRequest]:
        """Return a model's quarantined requests, oldest first. ModelNotFound, Unavailable."""
        return await quarantined_requests(self.connection, await self.directory.all_partitions(model))

    async def quarantined_request(self, request_id: str) -> QuarantinedRequest:
        """Return a quarantined request of any tenant. RequestNotFound, also where it isn't quarantined; Unavailable."""
        return await quarantined_request(self.connection, await self.directory.locate(request_id), request_id)

    async def requeue(self, request_id: str) -> str:
        """Requeue a quarantined request from where it stood, for the same tenant.

        Its log keeps its end. The new request runs whether or not it is read, and its deadline starts anew.
        RequestNotFound, PartitionGone, ModelNotFound, Unavailable.

        Returns:
            The id of the new request; a repeated call returns the same one.
        """
        where = await self.directory.locate_published(request_id)
        return await requeue_quarantined(self.connection, where, request_id, self.directory.check_published)

    async def note_poison(self, spec: RequestSpec) -> None:
        """Have gateways refuse requests that equal this one, for POISON_S. Unavailable; a retry is harmless.

        It was suspected of an engine's death, or was quarantined, and has ended.
        """
        key, lifetime_ms = self.connection.keyspace.poison(spec.model), POISON_S * 1000
        entry = ("digest", equality_digest(spec), "id", spec.request_id)
        commands = [("XADD", key, "MAXLEN", "~", _MOST_POISON, "*", *entry), ("PEXPIRE", key, lifetime_ms)]
        await self.connection.pipeline(commands)

    async def end_request(
        self,
        where: Partition,
        request_id: str,
        reason: str,
        *,
        tenant: str = "",
        condition: str = "",
        error: str = "",
        least_age_ms: int = 0,
    ) -> FinishReason | None:
        """End a request from outside and wake its readers. Unavailable; a retry is harmless.

        Args:
            reason: name of the finish reason, see protocol.finish_reasons.
            tenant: end it only if it is this tenant's; "" for any.
            condition: "deadlines", "graces" or "verdicts" ends it only if it is due there by Redis' clock now; after
                "verdicts" it is listed as quarantined. "unclaimed" ends it only if it has no deadline, no engine has
                ever claimed it, and it was accepted `least_age_ms` ago; "queued" only if no engine runs it. "" for no
                condition.
            error: "<code>\\0<message>"; "" for none.
            least_age_ms: see `condition`.

        Returns:
            How it ended, now or before; None where there is no such request or the condition doesn't hold.
        """
        settings = self.settings
        retention_s = settings.dead_retention_s if condition == "verdicts" else settings.retention_s
        arguments = request_id, tenant, reason, retention_s * 1000, condition, error, settings.max_dead, least_age_ms
        reply = await self.connection.run_acknowledged(END, where.prefix, *arguments)
        if reply[0] not in (1, 2):
            return None
        _, ended_by, next_index, readers, owner = reply
        for listener in self.end_listeners:
            listener(owner.decode(), request_id)
        message = wake_up_message(LogSlice(request_id=request_id, first_index=next_index))
        await publish_wake_ups(self.connection, [(message, readers)])
        return parse_finish_reason(ended_by.decode())


async def expire_engine(broker: Broker, engine_id: str) -> None:
    """Reclaim at once all requests of an engine whose process is known to be dead. Unavailable.

    `engine_id`: an engine's id, or its name without the boot nonce. With the name, the requests of every boot of it are
    reclaimed, so call it before the next one starts.
    """
    calls = []
    for name in await broker.directory.names():
        for where in await broker.directory.all_partitions(name):
            arguments = engine_id, where.doorbell, where.number, broker.settings.control_ms
            calls.append(Call(EXPIRE, where.prefix, arguments))
    await broker.connection.run_many(calls)


async def discard_request(broker: Broker, request_id: str, tenant: str) -> None:
    """End a request, free its idempotency key, and let its record and log expire soon. RequestNotFound, Unavailable.

    Views say at once that it is discarded. A reader has `DISCARDED_KEPT_S` seconds to see its end.
    """
    await broker.cancel(request_id, tenant)
    # The key goes first: one that outlived the record would have the request accepted again, under its old id.
    await free_key(broker, await broker.spec(request_id, tenant))
    where = await broker.directory.locate(request_id)
    if not await broker.connection.run(DISCARD, where.prefix, request_id, tenant, DISCARDED_KEPT_S * 1000):
        raise RequestNotFound(request_id)


async def free_key(broker: Broker, spec: RequestSpec) -> None:
    """Free the idempotency key of a request that is discarded: a later try makes a new request. Unavailable."""
    if spec.idempotency_key:
        connection = broker.connection
        run = connection.run_acknowledged if connection.is_cluster else connection.run
        await run(FREE_KEY, connection.keyspace.reservation(spec.tenant, spec.idempotency_key), spec.request_id)


logger = logging.getLogger(__name__)

_KEPT_MS = 7 * 24 * 3600 * 1000  # the longest time that a request may be given over HTTP
_LIMIT_S = 0.5  # a list that cannot be written at once is not waited for: the request is accepted already
_READ_AT_ONCE = 100
_FIELDS = ("tenant", "state", "reason", "next", "ptok", "others", "cached", "attempts", "accepted", "discarded")


@dataclass(frozen=True)
class RequestPage:
    """Part of a tenant's list."""

    requests: Sequence[RequestSummary]
    has_more: bool


async def enlist(broker: Broker, request_id: str, tenant: str) -> None:
    """Add an accepted request to its tenant's list. It is logged, not raised, where Redis cannot take it now."""
    name = broker.connection.keyspace.requests(tenant)
    try:
        async with within(_LIMIT_S, "the list of a tenant's requests"):
            await broker.connection.run(ENLIST, name, request_id, broker.settings.max_listed_requests, _KEPT_MS)
    except Unavailable as error:
        logger.warning(
            "a request is missing from its tenant's list",
            extra={"request_id": request_id, "tenant": tenant, "reason": str(error)},
        )


async def tenant_of(broker: Broker, request_id: str) -> str:
    """Return whose a request is. RequestNotFound, also for a malformed id; Unavailable."""
    where = await broker.directory.locate(request_id)
    tenant = await broker.connection.execute("HGET", where.request(request_id), "tenant")
    if tenant is None:
        raise RequestNotFound(request_id)
    return str(tenant.decode())


async def list_requests(broker: Broker, tenant: str, *, limit: int, after: str = "") -> RequestPage:
    """Return up to `limit` of a tenant's requests, newest first.

    Args:
        limit: most requests of the page.
        after: the id of the last request of the page before; "" for the first page.

    Raises:
        RequestNotFound: `after` is not in the list, or no longer.
        Unavailable: a retry is harmless.
    """
    name = broker.connection.keyspace.requests(tenant)
    start = 0
    if after:
        rank = await broker.connection.execute("ZREVRANK", name, after)
        if rank is None:
            raise RequestNotFound(after)
        start = rank + 1
    found: list[RequestSummary] = []
    while len(found) <= limit:
        members = await broker.connection.execute("ZREVRANGE", name, start, start + _READ_AT_ONCE - 1)
        if not members:
            break
        ids = [member.decode() for member in members]
        summaries = await summaries_of(broker, ids, tenant)
        found += [summary for summary in summaries if summary is not None and not summary.is_discarded]
        gone = [request_id for request_id, summary in zip(ids, summaries, strict=True) if summary is None]
        start += len(ids) - len(gone)
        if gone:
            start += await broker.connection.run(DELIST, name, broker.settings.retention_s * 1000, *gone)
    return RequestPage(found[:limit], has_more=len(found) > limit)


async def summaries_of(broker: Broker, ids: Sequence[str], tenant: str) -> list[RequestSummary | None]:
    """Return the state of each of a tenant's requests; None where its record is gone. Unavailable."""
    places = [await _locate(broker, request_id) for request_id in ids]
    known = [(request_id, where) for request_id, where in zip(ids, places, strict=True) if where is not None]
    replies = await broker.connection.pipeline(
        [("HMGET", where.request(request_id), *_FIELDS) for request_id, where in known]
    )
    summaries = {
        request_id: _summary(request_id, where, reply)
        for (request_id, where), reply in zip(known, replies, strict=True)
        if reply[0] == tenant.encode()
    }
    return [summaries.get(request_id) for request_id in ids]


async def _locate(broker: Broker, request_id: str) -> Partition | None:
    try:
        return await broker.directory.locate(request_id)
    except RequestNotFound:
        return None  # its model was removed


def _summary(request_id: str, where: Partition, fields: Sequence[Any]) -> RequestSummary:
    _, state, reason, next_index, prompt, others, cached, attempts, accepted, discarded = fields
    return RequestSummary(
        request_id=request_id,
        model=where.model,
        state=STATES[state],
        finish_reason=parse_finish_reason((reason or b"").decode()),
        next_index=int(next_index),
        usage=Usage(
            prompt_tokens=int(prompt), completion_tokens=int(next_index) - int(others), cached_tokens=int(cached)
        ),
        attempts=int(attempts),
        accepted_at=int(accepted) / 1000,
        is_discarded=discarded == b"1",
    )


_QUARANTINE_FIELDS = ("dead", "spec", "revived_as")


async def quarantined_requests(connection: Connection, partitions: Sequence[Partition]) -> list[QuarantinedRequest]:
    """Return the quarantined requests of some partitions, oldest first. Unavailable."""
    streams = await connection.pipeline([("XRANGE", where.dead, "-", "+") for where in partitions])
    found = [(where, row) for where, rows in zip(partitions, streams, strict=True) for row in rows]
    records = await connection.pipeline([_record_command(where, row[1][b"id"].decode()) for where, row in found])
    dead = [
        _to_request(where, row, record)
        for (where, row), record in zip(found, records, strict=True)
        if record[0] == row[0]  # else the record is past its retention
    ]
    return sorted(dead, key=lambda each: (each.quarantined_at, each.request_id))


async def quarantined_request(connection: Connection, where: Partition, request_id: str) -> QuarantinedRequest:
    """Return a quarantined request. RequestNotFound where it isn't quarantined; Unavailable."""
    record = await connection.execute(*_record_command(where, request_id))
    if record[0] is None:
        raise RequestNotFound(request_id)
    rows = await connection.execute("XRANGE", where.dead, record[0], record[0])
    if not rows:
        raise RequestNotFound(request_id)
    return _to_request(where, rows[0], record)


async def requeue_quarantined(
    connection: Connection, where: Partition, request_id: str, check_published: Callable[[str], Awaitable[None]]
) -> str:
    """Requeue a quarantined request; return its new id, the same in a repeated call. RequestNotFound, Unavailable.

    `check_published`: raises where the model of an id is not published now; called where the partition was closed.
    """
    spec = RequestSpec()
    spec.CopyFrom((await quarantined_request(connection, where, request_id)).spec)
    spec.idempotency_key = ""  # stays with the quarantined request, whose log has its end
    spec.request_id = new_request_id(where.model, where.number, spec.tenant)
    # Without a reader yet, a disconnect grace would end it before the administrator has looked.
    spec.on_disconnect = ON_DISCONNECT_CONTINUE
    arguments = (
        request_id,
        spec.request_id,
        spec.SerializeToString(),
        spec.deadline_ms,
        spec.disconnect_grace_ms,
        1,
        where.doorbell,
        where.number,
    )
    made = await connection.run(REVIVE, where.prefix, *arguments)
    if made is not None and not made[0]:
        await check_published(request_id)
        made = await connection.run(REVIVE, where.prefix, *arguments, made[1])
    if made is None:
        raise RequestNotFound(request_id)
    if not made[0]:
        raise ModelNotFound(where.model)
    return str(made[0].decode())


def _record_command(where: Partition, request_id: str) -> tuple[str, ...]:
    return ("HMGET", where.request(request_id), *_QUARANTINE_FIELDS)


def _to_request(
    where: Partition, row: tuple[bytes, Mapping[bytes, bytes]], record: Sequence[Any]
) -> QuarantinedRequest:
    entry, fields = row
    milliseconds, _, _ = entry.partition(b"-")
    return QuarantinedRequest(
        request_id=fields[b"id"].decode(),
        model=where.model,
        tenant=fields[b"tenant"].decode(),
        reason=fields[b"reason"].decode(),
        next_index=int(fields[b"index"]),
        attempts=int(fields[b"attempts"]),
        engines=tuple(fields[b"engines"].decode().split()),
        quarantined_at=int(milliseconds) / 1000,
        requeued_as=None if record[2] is None else record[2].decode(),
        spec=RequestSpec.FromString(record[1]),
    )


_RUNNING = b"running"


async def read_owners(broker: Broker, request_ids: Sequence[str]) -> list[str]:
    """Return the id of the engine that runs each request; "" for one that none runs. Unavailable, RequestNotFound.

    An engine that has died is a request's owner until the request is taken from it.
    """
    places = [await broker.directory.locate(each) for each in request_ids]
    keys = [where.request(each) for where, each in zip(places, request_ids, strict=True)]
    found = await broker.connection.pipeline([("HMGET", key, "state", "owner") for key in keys])
    return [owner.decode() if state == _RUNNING and owner else "" for state, owner in found]
