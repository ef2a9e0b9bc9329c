"""Reservations of idempotency keys: a tenant's key names one request id until the retention of its log ends."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.connection.connection import Connection
from pagestream_streams.errors import IdempotencyConflict, Unavailable
from pagestream_streams.protocol.keys import Keyspace
from pagestream_streams.scripts import RELEASE, RESERVE

_log = logging.getLogger(__name__)

_UNREAD_MS = 86_400_000  # longest wait and run of a request without readers, which would renew it


@dataclass(frozen=True)
class Reservation:
    """A try's hold on an idempotency key."""

    prefix: str
    """Keyspace.reservation of the key."""
    name: str
    """Keyspace.idempotency of the key."""
    request_id: str
    """What the key stands for: this try's request, or that of an earlier one."""
    attempt: str


async def reserve(connection: Connection, spec: RequestSpec, *, body_digest: str, retention_s: int) -> Reservation:
    """Reserve the spec's idempotency key for its request id, or join an earlier try.

    On a cluster the key is on a node of its own, and is waited for there as the settings ask. Elsewhere the accept that
    follows waits for what was written before it.

    Raises:
        IdempotencyConflict: the key was used with another body.
        Unavailable: a retry is harmless.
    """
    prefix = connection.keyspace.reservation(spec.tenant, spec.idempotency_key)
    attempt = secrets.token_hex(8)
    run = connection.run_acknowledged if connection.is_cluster else connection.run
    found = await run(RESERVE, prefix, spec.request_id, body_digest, _length_ms(spec, retention_s), attempt)
    if found is None:
        raise IdempotencyConflict(spec.idempotency_key)
    return Reservation(prefix, _name(connection.keyspace, spec), found.decode(), attempt)


async def reserved_id(connection: Connection, tenant: str, key: str) -> str | None:
    """Return the request id that a tenant's key stands for, accepted or not; None for none. Unavailable."""
    found = await connection.execute("GET", connection.keyspace.idempotency(tenant, key))
    return None if found is None else found.decode().partition(" ")[0]


async def release(connection: Connection, reservation: Reservation) -> None:
    """Free the key after a refusal, unless another try may have been accepted under it."""
    try:
        await connection.run(RELEASE, reservation.prefix, reservation.request_id, reservation.attempt)
    except Unavailable as error:
        _log.info("an idempotency key stays reserved although its request was refused: %s", error)


async def shorten(connection: Connection, reservation: Reservation, retention_s: int) -> None:
    """Let the key of a finished request expire no later than its record, which this try has renewed."""
    try:
        await connection.execute("PEXPIRE", reservation.name, _kept_ms(retention_s))
    except Unavailable as error:
        _log.info("an idempotency key stays reserved for longer than its request's log: %s", error)


async def renew(connection: Connection, specs: Iterable[RequestSpec], retention_s: int, limit_s: float) -> None:
    """Renew the reservations of running requests that have a key. Unavailable, also after `limit_s` seconds."""
    lengths: dict[str, int] = {}
    for spec in specs:
        if spec.idempotency_key:
            tries = f"{connection.keyspace.reservation(spec.tenant, spec.idempotency_key)}tries"
            lengths[tries] = lengths[_name(connection.keyspace, spec)] = _length_ms(spec, retention_s)
    await connection.pipeline([("PEXPIRE", name, length_ms) for name, length_ms in lengths.items()], limit_s)


def renewal_s(retention_s: int) -> float:
    """Return the seconds between renewals: a key outlives the log of a request that ends just before the next one."""
    return retention_s / 8


def record_ms(retention_s: int) -> int:
    """Return how long a finished request that has a key is kept: no shorter than a key that was renewed after its end.

    A reader hears of the end late, and may renew the key once more.
    """
    return _kept_ms(retention_s) + round(renewal_s(retention_s) * 1000)


def _kept_ms(retention_s: int) -> int:
    return retention_s * 1250


def _name(keyspace: Keyspace, spec: RequestSpec) -> str:
    return keyspace.idempotency(spec.tenant, spec.idempotency_key)


def _length_ms(spec: RequestSpec, retention_s: int) -> int:
    unread_ms = _UNREAD_MS if spec.on_disconnect == ON_DISCONNECT_CONTINUE else 0
    return _kept_ms(retention_s) + unread_ms
