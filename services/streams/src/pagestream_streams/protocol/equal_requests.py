"""Which requests are equal, whoever sends them when: those that make the same work for an engine."""

from __future__ import annotations

from hashlib import sha256

from pagestream.v1.records_pb2 import RequestSpec

POISON_S = 600
"""For so long requests are refused that equal one which engines died of."""

_OF_ONE_CALL = (
    "request_id",
    "client_request_id",
    "traceparent",
    "tracestate",
    "idempotency_key",
    "deadline_ms",
    "on_disconnect",
    "disconnect_grace_ms",
    "answer",
    "priority",
    "credential",
)


def equality_digest(spec: RequestSpec) -> bytes:
    """Return a digest of a request without what each call has of its own: ids, its seed, deadline and priority.

    Tenants count: nobody can have the requests of another refused.
    """
    same = RequestSpec()
    same.CopyFrom(spec)
    for each in _OF_ONE_CALL:
        same.ClearField(each)
    same.sampling.ClearField("seed")
    return sha256(same.SerializeToString(deterministic=True)).digest()
