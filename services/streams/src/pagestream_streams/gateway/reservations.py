"""Reservations of idempotency keys: a tenant's key names one request id until the retention of its log ends."""

from __future__ import annotations

from collections.abc import Iterable

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.connection.connection import Connection
from pagestream_streams.errors import IdempotencyConflict, Unavailable
from pagestream_streams.protocol.keys import Keyspace

_UNREAD_MS = 86_400_000  # longest wait and run of a request without readers, which would renew it
_TRIES = 3  # a reservation can expire between SET and GET


async def reserve(connection: Connection, spec: RequestSpec, *, body_digest: str, retention_s: int) -> str:
    """Reserve the spec's idempotency key for its request id.

    Returns:
        The id that the key stands for: the spec's, or that of an earlier try.

    Raises:
        IdempotencyConflict: the key was used with another body.
        Unavailable: a retry is harmless.
    """
    name, length_ms = _name(connection.keyspace, spec), _length_ms(spec, retention_s)
    value = f"{spec.request_id} {body_digest}"
    for _ in range(_TRIES):
        if await connection.execute("SET", name, value, "NX", "PX", length_ms):
            return spec.request_id
        found, renewed = await connection.pipeline([("GET", name), ("PEXPIRE", name, length_ms)])
        if found is not None and renewed:
            earlier, _, digest = found.decode().partition(" ")
            if digest != body_digest:
                raise IdempotencyConflict(spec.idempotency_key)
            return str(earlier)
    raise Unavailable(f"the idempotency key's reservation expired while it was read, {_TRIES} times in a row")


async def renew(connection: Connection, specs: Iterable[RequestSpec], retention_s: int, limit_s: float) -> None:
    """Renew the reservations of running requests that have a key. Unavailable, also after `limit_s` seconds."""
    keyspace = connection.keyspace
    lengths = {_name(keyspace, spec): _length_ms(spec, retention_s) for spec in specs if spec.idempotency_key}
    await connection.pipeline([("PEXPIRE", name, length_ms) for name, length_ms in lengths.items()], limit_s)


def renewal_s(retention_s: int) -> float:
    """Return the seconds between renewals: a key outlives the log of a request that ends just before the next one."""
    return retention_s / 8


def _name(keyspace: Keyspace, spec: RequestSpec) -> str:
    return keyspace.idempotency(spec.tenant, spec.idempotency_key)


def _length_ms(spec: RequestSpec, retention_s: int) -> int:
    unread_ms = _UNREAD_MS if spec.on_disconnect == ON_DISCONNECT_CONTINUE else 0
    return retention_s * 1250 + unread_ms
