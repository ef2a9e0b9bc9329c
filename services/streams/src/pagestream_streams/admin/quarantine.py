"""What was quarantined, for the person who runs the deployment: requests that killed their engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.connection.connection import Connection
from pagestream_streams.connection.scripts import REVIVE
from pagestream_streams.errors import RequestNotFound
from pagestream_streams.protocol import ids, keys
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import DeadRequest

_FIELDS = ("dead", "spec", "revived_as")


async def listed(connection: Connection, partitions: Sequence[Partition]) -> list[DeadRequest]:
    """The quarantined requests of some partitions, the oldest first. Those past their retention are left out."""
    streams = await connection.pipeline([("XRANGE", where.dead, "-", "+") for where in partitions])
    found = [(where, row) for where, rows in zip(partitions, streams, strict=True) for row in rows]
    records = await connection.pipeline([_record_command(where, row[1][b"id"].decode()) for where, row in found])
    dead = [
        _made(where, row, record)
        for (where, row), record in zip(found, records, strict=True)
        if record[0] == row[0]  # else the record is past its retention
    ]
    return sorted(dead, key=lambda each: (each.quarantined_at, each.request_id))


async def one(connection: Connection, where: Partition, request_id: str) -> DeadRequest:
    """A quarantined request. RequestNotFound."""
    record = await connection.execute(*_record_command(where, request_id))
    if record[0] is None:
        raise RequestNotFound(request_id)
    rows = await connection.execute("XRANGE", where.dead, record[0], record[0])
    if not rows:
        raise RequestNotFound(request_id)
    return _made(where, rows[0], record)


async def revived(connection: Connection, where: Partition, request_id: str) -> str:
    """Lets a quarantined request go on under a new id; the same one when asked again. RequestNotFound."""
    spec = RequestSpec()
    spec.CopyFrom((await one(connection, where, request_id)).spec)
    spec.idempotency_key = ""  # it stays the first one's, which has had its end
    spec.request_id = ids.new(where.model, where.number, spec.tenant)
    # Nobody reads it yet: a grace would end it before the person who asked has looked.
    spec.on_disconnect = ON_DISCONNECT_CONTINUE
    made = await connection.run(
        REVIVE,
        where.prefix,
        request_id,
        spec.request_id,
        spec.SerializeToString(),
        spec.deadline_ms,
        spec.disconnect_grace_ms,
        1,
        keys.doorbell(where.model),
        where.number,
    )
    if made is None:
        raise RequestNotFound(request_id)
    return str(made.decode())


def _record_command(where: Partition, request_id: str) -> tuple[str, ...]:
    return ("HMGET", where.request(request_id), *_FIELDS)


def _made(where: Partition, row: tuple[bytes, Mapping[bytes, bytes]], record: Sequence[Any]) -> DeadRequest:
    entry, fields = row
    milliseconds, _, _ = entry.partition(b"-")
    return DeadRequest(
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
