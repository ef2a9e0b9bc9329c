"""Errors as callers see them: one table for both APIs."""

from dataclasses import dataclass

import grpc
from pagestream_streams import errors as streams

from pagestream_gateway import errors


@dataclass(frozen=True)
class Problem:
    """An error in the words of both APIs.

    Attributes:
        http_status: status of the HTTP answer.
        grpc_status: status of the call.
        kind: OpenAI's `type`, the family of the error.
        code: OpenAI's `code`, and the reason of google.rpc.ErrorInfo in upper case: a stable word.
        message: for people.
        field: the field of the request that is wrong.
        retry_after_s: seconds after which a retry may do; None where a retry changes nothing.
    """

    http_status: int
    grpc_status: grpc.StatusCode
    kind: str
    code: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_Code = grpc.StatusCode
# Subclasses stand before their bases.
_TABLE: tuple[tuple[type[Exception], int, grpc.StatusCode, str, str], ...] = (
    (errors.PromptTooLong, 400, _Code.INVALID_ARGUMENT, _INVALID, "context_length_exceeded"),
    (errors.UnsupportedField, 400, _Code.INVALID_ARGUMENT, _INVALID, "unsupported_parameter"),
    (errors.InvalidRequest, 400, _Code.INVALID_ARGUMENT, _INVALID, "invalid_value"),
    (errors.Unauthenticated, 401, _Code.UNAUTHENTICATED, _INVALID, "invalid_api_key"),
    (errors.BodyTooLarge, 413, _Code.RESOURCE_EXHAUSTED, _INVALID, "body_too_large"),
    (errors.WrongContentType, 415, _Code.INVALID_ARGUMENT, _INVALID, "wrong_content_type"),
    (errors.Overloaded, 429, _Code.RESOURCE_EXHAUSTED, "rate_limit_error", "overloaded"),
    (errors.GatewayStopping, 503, _Code.UNAVAILABLE, _SERVER, "gateway_stopping"),
    (streams.Unavailable, 503, _Code.UNAVAILABLE, _SERVER, "unavailable"),
    (streams.QueueFull, 429, _Code.RESOURCE_EXHAUSTED, "rate_limit_error", "queue_full"),
    (streams.RequestNotFound, 404, _Code.NOT_FOUND, _INVALID, "request_not_found"),
    (streams.ModelNotFound, 404, _Code.NOT_FOUND, _INVALID, "model_not_found"),
    (streams.ModelNameRefused, 404, _Code.NOT_FOUND, _INVALID, "model_not_found"),
    (streams.OffsetOutOfRange, 416, _Code.OUT_OF_RANGE, _INVALID, "offset_out_of_range"),
    (streams.DigestMismatch, 409, _Code.DATA_LOSS, _INVALID, "digest_mismatch"),
    (streams.IdempotencyConflict, 409, _Code.ALREADY_EXISTS, _INVALID, "idempotency_conflict"),
)
_FIELDS: dict[type[Exception], str] = {
    streams.ModelNotFound: "model",
    streams.ModelNameRefused: "model",
    streams.RequestNotFound: "request_id",
    streams.OffsetOutOfRange: "next_index",
    streams.DigestMismatch: "digest",
    streams.IdempotencyConflict: "idempotency_key",
}
_UNAVAILABLE_RETRY_S = 1.0


def problem_of(error: Exception) -> Problem:
    """How `error` is told to a caller. What is not in the table is a fault of ours: its message stays in the log."""
    if isinstance(error, errors.GenerationFailed):
        return Problem(500, _Code.INTERNAL, _SERVER, error.code, str(error))
    for kind, http_status, grpc_status, family, code in _TABLE:
        if isinstance(error, kind):
            return Problem(
                http_status, grpc_status, family, code, _message(error), _field(error), _retry_after_s(error)
            )
    return Problem(
        500, _Code.INTERNAL, _SERVER, "internal_error", "the gateway failed on this request; its log tells why"
    )


def _message(error: Exception) -> str:
    if isinstance(error, streams.ModelNotFound):
        return f"the model {error.name!r} does not exist; GET /v1/models or ListModels names those that do"
    if isinstance(error, streams.Unavailable):
        return "the durable store does not answer now; try again"  # what Redis said stays in the log
    return str(error)


def _field(error: Exception) -> str | None:
    if isinstance(error, errors.InvalidRequest):
        return error.field
    return next((field for kind, field in _FIELDS.items() if isinstance(error, kind)), None)


def _retry_after_s(error: Exception) -> float | None:
    if isinstance(error, errors.Overloaded | streams.QueueFull):
        return error.retry_after_s
    if isinstance(error, errors.GatewayStopping | streams.Unavailable):
        return _UNAVAILABLE_RETRY_S
    return None
