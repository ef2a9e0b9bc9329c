"""A call that failed, over either protocol, and the typed error that it becomes where it is not tried again."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pagestream_client import errors


class Code(enum.Enum):
    """The canonical codes of google.rpc.Code: gRPC's statuses; HTTP answers are mapped to them."""

    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    UNAUTHENTICATED = "UNAUTHENTICATED"


MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
"""The reason of a NOT_FOUND that names a model, not a request."""
_BROKEN = (Code.CANCELLED, Code.UNKNOWN, Code.INTERNAL, Code.ABORTED)


@dataclass(frozen=True)
class Failure:
    """A call that failed."""

    code: Code
    message: str
    reason: str = ""
    """The gateway's stable word in upper case, such as "QUEUE_FULL"; empty where the transport failed before a gateway
    gave a reason."""
    field: str | None = None
    """The field of the request that is wrong."""
    retry_after_s: float | None = None
    """Seconds that the gateway asks to wait; None where a retry changes nothing, or where it did not say."""
    http_status: int | None = None
    """Status of the HTTP answer; None over gRPC, and where no answer came."""

    @property
    def is_transient(self) -> bool:
        """Whether another try may help: no gateway answered, or the gateway asks to come back."""
        if self.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            return True
        return self.code in _BROKEN and not self.reason  # a broken connection, if no gateway gives a reason

    @property
    def is_gateway_unable(self) -> bool:
        """Whether a gateway has said that it cannot serve now: it stops, or Redis does not answer it."""
        return self.code is Code.UNAVAILABLE and bool(self.reason)

    @property
    def is_queue_full(self) -> bool:
        """Whether the gateway asks to wait because there is no room."""
        return self.code is Code.RESOURCE_EXHAUSTED and self.retry_after_s is not None


def error_of(failure: Failure) -> errors.PagestreamError:
    """Return the typed error of a failure that is not tried again."""
    error = _typed(failure)
    error.http_status = failure.http_status
    return error


def _typed(failure: Failure) -> errors.PagestreamError:
    if failure.is_transient:
        return errors.Unavailable(failure.message)
    if failure.is_queue_full:
        return errors.QueueFull(failure.message, failure.retry_after_s or 0.0)
    if failure.code in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED):  # the latter: too many bytes
        return errors.InvalidRequest(failure.field, failure.message)
    if failure.reason == MODEL_NOT_FOUND:
        return errors.ModelNotFound(failure.message)
    kind = _KINDS.get(failure.code)
    return errors.ServerError(failure.code.name, failure.message) if kind is None else kind(failure.message)


_KINDS: dict[Code, type[errors.PagestreamError]] = {
    Code.UNAUTHENTICATED: errors.Unauthenticated,
    Code.NOT_FOUND: errors.RequestNotFound,
    Code.ALREADY_EXISTS: errors.IdempotencyConflict,
    Code.OUT_OF_RANGE: errors.OffsetOutOfRange,
    Code.DATA_LOSS: errors.DataLoss,
}
