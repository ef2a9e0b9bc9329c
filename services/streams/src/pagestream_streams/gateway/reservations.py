"""Which request an idempotency key stands for: reserved before the accept, kept for as long as the request."""

from __future__ import annotations

from collections.abc import Iterable

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.connection.connection import Connection
from pagestream_streams.errors import IdempotencyConflict, Unavailable
from pagestream_streams.protocol import keys

_UNREAD_MS = 86_400_000  # readers renew a reservation; where none is needed, it may wait and run so long
_TRIES = 3  # a reservation can expire between two looks at it


async def reserve(connection: Connection, spec: RequestSpec, *, body_digest: str, retention_s: int) -> str:
    """The id that the tenant's key stands for: the spec's, or that of an earlier try. IdempotencyConflict where the key
    came with another body; Unavailable.
    """
    name, length_ms = _name(spec), _length_ms(spec, retention_s)
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
    raise Unavailable("the idempotency key's reservation expired while it was looked at, again and again")


async def renew(connection: Connection, specs: Iterable[RequestSpec], retention_s: int, limit_s: float) -> None:
    """Keeps the reservations of requests that run, those that have one. Unavailable, also after the limit."""
    lengths = {_name(spec): _length_ms(spec, retention_s) for spec in specs if spec.idempotency_key}
    await connection.pipeline([("PEXPIRE", name, length_ms) for name, length_ms in lengths.items()], limit_s)


def renewal_s(retention_s: int) -> float:
    """How often to renew: so that what ends just before the next time keeps its key for as long as its log."""
    return retention_s / 8


def _name(spec: RequestSpec) -> str:
    return keys.idempotency(spec.tenant, spec.idempotency_key)


def _length_ms(spec: RequestSpec, retention_s: int) -> int:
    unread_ms = _UNREAD_MS if spec.on_disconnect == ON_DISCONNECT_CONTINUE else 0
    return retention_s * 1250 + unread_ms
