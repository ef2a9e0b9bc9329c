"""Errors as callers see them: one table of codes for all APIs, with where each refusal is decided.

`failure` in `streams/events.py` makes the error that a log ends with.
"""

import dataclasses
import http
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc
from pagestream_batches import errors as batches
from pagestream_streams import errors as streams
from pagestream_streams.admin.sweeper import MODEL_UNAVAILABLE, NO_ENGINE
from pagestream_streams.protocol.records import INVALID_REQUEST
from pagestream_streams.rates import Rate

from pagestream_gateway import errors

_NAMES = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "tokens_per_day": "tokens-day",
    "concurrent_requests": "concurrent-requests",
}
HEADERS = tuple(f"x-ratelimit-{what}-{name}" for name in _NAMES.values() for what in ("limit", "remaining", "reset"))
"""All that there may be."""


def rate_headers(rates: Sequence[Rate]) -> dict[str, str]:
    """Return the headers: of each limit the one of the tenant's and the credential's that leaves less."""
    headers: dict[str, str] = {}
    for name, short in _NAMES.items():
        found = [each for each in rates if each.name == name]
        if not found:
            continue
        least = min(found, key=lambda rate: rate.remaining)
        headers[f"x-ratelimit-limit-{short}"] = str(least.limit)
        headers[f"x-ratelimit-remaining-{short}"] = str(least.remaining)
        if least.reset_s is not None:
            headers[f"x-ratelimit-reset-{short}"] = duration(least.reset_s)
    return headers


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 250ms, 1s, 6m0s, 1h30m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s" if minutes else f"{rest}s"


class ErrorCode(NamedTuple):
    """How an error is reported."""

    http_status: int
    grpc_status: grpc.StatusCode
    type: str
    """OpenAI's `type`, the family of the error."""
    code: str
    """OpenAI's `code`, and in upper case the reason of google.rpc.ErrorInfo. A GenerationFailed has its own."""
    field: str | None = None
    """The field of the request that is wrong; errors that name a field of their own win."""


@dataclass(frozen=True)
class ErrorReport:
    """An error of one call."""

    http_status: int
    grpc_status: grpc.StatusCode
    type: str
    code: str
    message: str
    """Text for a person."""
    field: str | None = None
    retry_after_s: float | None = None
    """Seconds after which a retry may succeed; None where a retry changes nothing."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further headers of the answer; over gRPC, trailing metadata."""


_INVALID = "invalid_request_error"
_RATE = "rate_limit_error"
_SERVER = "server_error"
_Status = grpc.StatusCode

ERROR_CODES: dict[type[Exception], ErrorCode] = {
    errors.PromptTooLong: ErrorCode(400, _Status.INVALID_ARGUMENT, _INVALID, "context_length_exceeded"),
    errors.UnknownField: ErrorCode(400, _Status.INVALID_ARGUMENT, _INVALID, "unknown_parameter"),
    errors.UnsupportedField: ErrorCode(400, _Status.INVALID_ARGUMENT, _INVALID, "unsupported_parameter"),
    errors.InvalidRequest: ErrorCode(400, _Status.INVALID_ARGUMENT, _INVALID, "invalid_value"),
    errors.Unauthenticated: ErrorCode(401, _Status.UNAUTHENTICATED, _INVALID, "invalid_api_key"),
    errors.WrongCredential: ErrorCode(403, _Status.PERMISSION_DENIED, _INVALID, "wrong_credential"),
    errors.CredentialsUnavailable: ErrorCode(503, _Status.UNAVAILABLE, _SERVER, "credentials_unavailable"),
    errors.HostNotAllowed: ErrorCode(403, _Status.PERMISSION_DENIED, _INVALID, "host_not_allowed", "Host"),
    errors.OriginNotAllowed: ErrorCode(403, _Status.PERMISSION_DENIED, _INVALID, "origin_not_allowed", "Origin"),
    errors.BodyTooLarge: ErrorCode(413, _Status.RESOURCE_EXHAUSTED, _INVALID, "body_too_large"),
    errors.WrongContentType: ErrorCode(415, _Status.INVALID_ARGUMENT, _INVALID, "wrong_content_type"),
    errors.HeaderTooLarge: ErrorCode(431, _Status.RESOURCE_EXHAUSTED, _INVALID, "header_too_large"),
    errors.RequestTimeout: ErrorCode(408, _Status.DEADLINE_EXCEEDED, _INVALID, "request_timeout"),
    errors.MalformedHttp: ErrorCode(400, _Status.INVALID_ARGUMENT, _INVALID, "malformed_http"),
    errors.TooManyConnections: ErrorCode(503, _Status.UNAVAILABLE, _SERVER, "too_many_connections"),
    errors.AnswerTooLarge: ErrorCode(400, _Status.RESOURCE_EXHAUSTED, _INVALID, "answer_too_large"),
    # Decided in this process: gateway.py (bytes of requests), encoder.py (its queue), whole_answer.py, grpc.
    errors.Overloaded: ErrorCode(429, _Status.RESOURCE_EXHAUSTED, _RATE, "overloaded"),
    errors.GatewayStopping: ErrorCode(503, _Status.UNAVAILABLE, _SERVER, "gateway_stopping"),
    errors.NoEngine: ErrorCode(503, _Status.UNAVAILABLE, _SERVER, "no_engine"),
    errors.RequestFailed: ErrorCode(400, _Status.INVALID_ARGUMENT, _INVALID, "invalid_request"),
    errors.GenerationFailed: ErrorCode(500, _Status.INTERNAL, _SERVER, "engine_error"),
    streams.Unavailable: ErrorCode(503, _Status.UNAVAILABLE, _SERVER, "unavailable"),
    # Decided by Redis, at its maxmemory; raised by connection.py of streams.
    streams.StorageFull: ErrorCode(429, _Status.RESOURCE_EXHAUSTED, _RATE, "storage_full"),
    # Decided by accept.lua: the class's bound, or the tenant's share of it (reply 0).
    streams.QueueFull: ErrorCode(429, _Status.RESOURCE_EXHAUSTED, _RATE, "queue_full"),
    # Decided by engines that are short of memory, in their heartbeats; accept.lua reads it (reply 5).
    streams.ClassRefused: ErrorCode(429, _Status.RESOURCE_EXHAUSTED, _RATE, "class_refused"),
    # Decided by limits/admit.lua: a rate of the tenant or of its credential.
    streams.RateLimited: ErrorCode(429, _Status.RESOURCE_EXHAUSTED, _RATE, "rate_limit_exceeded"),
    streams.KnownPoison: ErrorCode(400, _Status.FAILED_PRECONDITION, _INVALID, "equal_request_quarantined"),
    # Decided by reserve_log.lua: the bytes that the tenant's logs may take in Redis.
    streams.LogsFull: ErrorCode(429, _Status.RESOURCE_EXHAUSTED, _RATE, "logs_full"),
    batches.FileNotFound: ErrorCode(404, _Status.NOT_FOUND, _INVALID, "file_not_found", "file_id"),
    batches.FileTooLarge: ErrorCode(413, _Status.RESOURCE_EXHAUSTED, _INVALID, "file_too_large", "file"),
    # Decided by create_file.lua and append_file.lua, and by files.py for all tenants together.
    batches.FilesFull: ErrorCode(429, _Status.RESOURCE_EXHAUSTED, _RATE, "files_full"),
    batches.FileInUse: ErrorCode(409, _Status.FAILED_PRECONDITION, _INVALID, "file_in_use", "file_id"),
    batches.FilePurposeDiffers: ErrorCode(400, _Status.INVALID_ARGUMENT, _INVALID, "invalid_value", "input_file_id"),
    batches.BatchNotFound: ErrorCode(404, _Status.NOT_FOUND, _INVALID, "batch_not_found", "batch_id"),
    batches.BatchEnded: ErrorCode(409, _Status.FAILED_PRECONDITION, _INVALID, "batch_ended", "batch_id"),
    # Decided by create_batch.lua for a tenant, by batches.py for all together: batches that have not ended.
    batches.BatchesFull: ErrorCode(429, _Status.RESOURCE_EXHAUSTED, _RATE, "batches_full"),
    streams.RequestNotFound: ErrorCode(404, _Status.NOT_FOUND, _INVALID, "request_not_found", "request_id"),
    streams.ModelUnavailable: ErrorCode(503, _Status.FAILED_PRECONDITION, _SERVER, "model_unavailable", "model"),
    streams.ModelNotFound: ErrorCode(404, _Status.NOT_FOUND, _INVALID, "model_not_found", "model"),
    streams.AdapterRefused: ErrorCode(400, _Status.INVALID_ARGUMENT, _INVALID, "adapter_refused", "lora_path"),
    streams.ModelNameRefused: ErrorCode(404, _Status.NOT_FOUND, _INVALID, "model_not_found", "model"),
    streams.OffsetOutOfRange: ErrorCode(416, _Status.OUT_OF_RANGE, _INVALID, "offset_out_of_range", "next_index"),
    streams.DigestMismatch: ErrorCode(409, _Status.DATA_LOSS, _INVALID, "digest_mismatch", "digest"),
    errors.RequestDiffers: ErrorCode(409, _Status.ALREADY_EXISTS, _INVALID, "request_differs", "request_id"),
    streams.IdempotencyConflict: ErrorCode(
        409, _Status.ALREADY_EXISTS, _INVALID, "idempotency_conflict", "idempotency_key"
    ),
}
"""Every error that a caller can cause or should know of. An error has the code of the nearest class that is here."""

INTERNAL_ERROR = "internal_error"
_INTERNAL = ErrorCode(500, _Status.INTERNAL, _SERVER, INTERNAL_ERROR)
_UNAVAILABLE_RETRY_S = 1.0
_FULL_RETRY_S = 5.0  # memory becomes free when logs expire, or by an operator's hand


def error_report(error: Exception) -> ErrorReport:
    """Return how `error` is reported to a caller.

    An error that is not in the table is a defect of the gateway: its message goes to the log alone.
    """
    kind = next((kind for kind in type(error).__mro__ if kind in ERROR_CODES), None)
    if kind is None:
        return ErrorReport(*_INTERNAL[:4], "the gateway failed on this request; its log has the cause")
    found = ERROR_CODES[kind]
    return ErrorReport(
        found.http_status,
        found.grpc_status,
        found.type,
        error.code if isinstance(error, errors.GenerationFailed) else found.code,
        _message(error),
        error.field if isinstance(error, errors.InvalidRequest | errors.RequestFailed) else found.field,
        _retry_after_s(error),
        _headers(error, found.http_status),
    )


def _message(error: Exception) -> str:
    if isinstance(error, streams.ModelNotFound):
        return f"the model {error.name!r} does not exist; GET /v1/models or ListModels names those that do"
    if isinstance(error, streams.StorageFull):
        return (
            "the durable store is at its memory limit and takes no new requests; those that were accepted go on; "
            "try again later"
        )
    if isinstance(error, streams.Unavailable):
        return "the durable store does not answer now; try again"  # what Redis said goes to the log alone
    return str(error)


def _retry_after_s(error: Exception) -> float | None:
    if isinstance(error, errors.Overloaded | streams.QueueFull | streams.RateLimited | streams.LogsFull):
        return error.retry_after_s
    if isinstance(error, streams.StorageFull):
        return _FULL_RETRY_S
    soon = errors.GatewayStopping | errors.TooManyConnections | errors.CredentialsUnavailable | streams.Unavailable
    if isinstance(error, soon):
        return _UNAVAILABLE_RETRY_S
    return None


QUARANTINED = "quarantined"
"""Code of a request that made engines hang or die."""


def _headers(error: Exception, status: int) -> dict[str, str]:
    """Return the limits, and whether clients should try again: OpenAI's and Anthropic's send what came back with 408,
    409, 429 or 5xx twice more, unless a header says that it won't help."""
    limits = rate_headers(error.rates) if isinstance(error, streams.RateLimited) else {}
    is_too_large = isinstance(error, streams.RateLimited | streams.LogsFull) and error.retry_after_s is None
    is_poison = isinstance(error, errors.GenerationFailed) and error.code == QUARANTINED
    if is_too_large or is_poison or status == http.HTTPStatus.CONFLICT:
        return {**limits, "x-should-retry": "false"}
    return limits


LOG_CODES = {
    "engine_error": "An engine failed on the request, or could not read it.",
    INVALID_REQUEST: "An engine found the request at fault.",
    NO_ENGINE: "No engine has served its model for long.",
    MODEL_UNAVAILABLE: "No engine that lists its model can load it.",
    "model_removed": "Its model was removed while it waited.",
    QUARANTINED: "It made engines hang or die, and is kept for operators.",
    "corrupt_record": "What Redis has of it can't be read.",
}
"""Codes with which the log of an accepted request may end, and what each means."""
