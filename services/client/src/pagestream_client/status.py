"""gRPC's errors, and what they are to a caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from pagestream_client import errors
from pagestream_client.details import details_in

_Code = grpc.StatusCode
_BROKEN = (_Code.CANCELLED, _Code.UNKNOWN, _Code.INTERNAL, _Code.ABORTED)


@dataclass(frozen=True)
class Failure:
    """A call that failed."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    """The gateway's stable word, such as "QUEUE_FULL"; empty where no gateway has spoken: the transport failed."""
    field: str | None = None
    """Of the request, where one is wrong."""
    retry_after_s: float | None = None
    """As the gateway asks; None where a retry changes nothing, or where it did not say."""

    @property
    def is_transient(self) -> bool:
        """Whether another try may help: nobody answered, or the gateway asks to come back."""
        if self.code in (_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED):
            return True
        return self.code in _BROKEN and not self.reason  # a broken connection, if no gateway gives a reason

    @property
    def is_gateway_unable(self) -> bool:
        """Whether a gateway has said that it cannot serve now: it stops, or Redis does not answer it."""
        return self.code is _Code.UNAVAILABLE and bool(self.reason)

    @property
    def is_queue_full(self) -> bool:
        """Whether the gateway asks to wait because there is no room."""
        return self.code is _Code.RESOURCE_EXHAUSTED and self.retry_after_s is not None


def failure_of(error: grpc.RpcError) -> Failure:
    """What an error of a call tells, whether of grpc.aio or of the blocking API."""
    call: Any = error
    code: grpc.StatusCode = call.code() or _Code.UNKNOWN
    details = details_in(call.trailing_metadata())
    return Failure(code, call.details() or code.name, details.reason, details.field, details.retry_after_s)


def error_of(failure: Failure) -> errors.PagestreamError:
    """The typed error of a failure that is not tried again."""
    if failure.is_transient:
        return errors.Unavailable(failure.message)
    if failure.is_queue_full:
        return errors.QueueFull(failure.message, failure.retry_after_s or 0.0)
    if failure.code in (_Code.INVALID_ARGUMENT, _Code.RESOURCE_EXHAUSTED):  # the latter: too many bytes
        return errors.InvalidRequest(failure.field, failure.message)
    if failure.reason == "MODEL_NOT_FOUND":
        return errors.ModelNotFound(failure.message)
    kind = _KINDS.get(failure.code)
    return errors.ServerError(failure.code.name, failure.message) if kind is None else kind(failure.message)


_KINDS: dict[grpc.StatusCode, type[errors.PagestreamError]] = {
    _Code.UNAUTHENTICATED: errors.Unauthenticated,
    _Code.NOT_FOUND: errors.RequestNotFound,
    _Code.ALREADY_EXISTS: errors.IdempotencyConflict,
    _Code.OUT_OF_RANGE: errors.OffsetOutOfRange,
    _Code.DATA_LOSS: errors.DataLoss,
}
