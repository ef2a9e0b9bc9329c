"""The errors of the client as one tree. The errors of gRPC and of the HTTP library never reach a caller: they are
chained to these.

PagestreamError
|- InvalidRequest         a field of the request is wrong
|- Unauthenticated        no API key, or an unknown one
|- ModelNotFound          no engine has ever published this model
|- RequestNotFound        never accepted, another tenant's, or past its retention
|- IdempotencyConflict    the key was used before with another body
|- OffsetOutOfRange       the offset is past the end of a finished log
|- DataLoss               the log differs from what was seen before
|- QueueFull              the deployment takes no more requests now
|- DeadlineExceeded       the deadline passed, and no gateway sent how the request ended
|- Unavailable            no gateway answered for as long as the client tries
|- GenerationFailed       the request was accepted and ended with an error
|  `- Quarantined         engines died of it
|- StreamClosed           the client was closed under an open stream or call
`- ServerError            a gateway failed on this request; its log has the reason
"""

# ruff: noqa: N818 -- the names read as conditions ("queue full"), as gRPC's and kopf's do

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a request's token log: what `resume` takes, on any gateway, in any process."""

    request_id: str
    next_index: int = 0
    """Number of log entries read so far: one for each token, for the finish of each choice, and for the end."""
    digest: str = ""
    """Rolling digest of the log up to there."""


class PagestreamError(Exception):
    """The root of this package's errors.

    Attributes:
        position: place after the last chunk that was read, for errors of accepted streams; else None.
        http_status: status of the HTTP answer that was the reason; None over gRPC and without an answer.
    """

    position: Position | None = None
    http_status: int | None = None


class InvalidRequest(PagestreamError):
    """A field of the request is wrong.

    Attributes:
        field: its path in the message, such as "sampling.temperature"; None for the request as a whole.
    """

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        if self.field is None or self.message.startswith(f"{self.field}:"):
            return self.message
        return f"{self.field}: {self.message}"


class Unauthenticated(PagestreamError):
    """The call carries no API key, or one that the gateways do not know."""


class ModelNotFound(PagestreamError):
    """No engine has ever published this model."""


class RequestNotFound(PagestreamError):
    """There is no such request: never accepted, of another tenant, malformed, or past its retention."""


class IdempotencyConflict(PagestreamError):
    """The idempotency key was used before with another body."""


class OffsetOutOfRange(PagestreamError):
    """The offset is past the end of a finished log."""


class DataLoss(PagestreamError):
    """The log differs from what was read before. Continuing would mix two generations; send a new request."""


class QueueFull(PagestreamError):
    """The deployment takes no more requests now, and asks to wait longer than the client's limit or the deadline.

    Attributes:
        retry_after_s: seconds after which a retry may succeed.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(PagestreamError):
    """The deadline passed, and no gateway sent how the request ended.

    Where no gateway has accepted the request, it is raised as soon as there is no time for another try.
    A request that was ended by its deadline is no error: its last chunks have `FinishReason.DEADLINE`. One that no
    engine has taken for long is GenerationFailed with the code "no_engine".
    """


class Unavailable(PagestreamError):
    """No gateway answered for as long as the client tries. An accepted request continues; resume it from `position`."""


class GenerationFailed(PagestreamError):
    """The request was accepted and ended with an error.

    Attributes:
        code: a stable identifier, such as "engine_error".
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message or "the generation failed")
        self.code = code


class Quarantined(GenerationFailed):
    """Engines died repeatedly at the same place of this request; it is not retried any more."""


class StreamClosed(PagestreamError):
    """The client was closed under a stream or a call that had not ended."""


class ServerError(PagestreamError):
    """A gateway failed on this request; its log has the reason.

    Attributes:
        status: name of the google.rpc code.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message or status)
        self.status = status
