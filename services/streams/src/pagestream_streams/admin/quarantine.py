"""Quarantined requests: list them, and requeue one that an administrator trusts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.connection.connection import Connection
from pagestream_streams.errors import ModelNotFound, RequestNotFound
from pagestream_streams.protocol.keys import Partition, new_request_id
from pagestream_streams.protocol.records import QuarantinedRequest
from pagestream_streams.scripts import REVIVE

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
