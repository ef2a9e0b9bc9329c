"""From HTTP's errors to failures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagestream_client.retry import Code, Failure

_CODES = {
    "context_length_exceeded": Code.INVALID_ARGUMENT,
    "unsupported_parameter": Code.INVALID_ARGUMENT,
    "invalid_value": Code.INVALID_ARGUMENT,
    "invalid_api_key": Code.UNAUTHENTICATED,
    "body_too_large": Code.RESOURCE_EXHAUSTED,
    "wrong_content_type": Code.INVALID_ARGUMENT,
    "overloaded": Code.RESOURCE_EXHAUSTED,
    "queue_full": Code.RESOURCE_EXHAUSTED,
    "class_refused": Code.RESOURCE_EXHAUSTED,
    "storage_full": Code.RESOURCE_EXHAUSTED,
    "gateway_stopping": Code.UNAVAILABLE,
    "unavailable": Code.UNAVAILABLE,
    "request_not_found": Code.NOT_FOUND,
    "model_not_found": Code.NOT_FOUND,
    "offset_out_of_range": Code.OUT_OF_RANGE,
    "digest_mismatch": Code.DATA_LOSS,
    "idempotency_conflict": Code.ALREADY_EXISTS,
    "internal_error": Code.INTERNAL,
}
"""By the `code` of a gateway's error body; in upper case it is the reason that the same error has over gRPC."""
_STATUSES = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.UNAUTHENTICATED,
    404: Code.NOT_FOUND,
    409: Code.ALREADY_EXISTS,
    413: Code.RESOURCE_EXHAUSTED,
    415: Code.INVALID_ARGUMENT,
    416: Code.OUT_OF_RANGE,
    422: Code.INVALID_ARGUMENT,
    429: Code.RESOURCE_EXHAUSTED,
    500: Code.INTERNAL,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}
"""For answers without one of these codes: from a proxy, or from another server."""
_RETRY_AFTER_S = 1.0
"""For a 429 that does not say when to come back."""


class CallRefused(Exception):  # noqa: N818 -- never leaves the client
    """A call was answered with an error, or cut by the client itself."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of_answer(status: int, headers: Mapping[str, str], content: bytes) -> Failure:
    """Return the failure that an answer other than 200 stands for.

    Args:
        headers: the answer's; case-insensitive, or in lower case.
    """
    error = _error_in(content)
    code = str(error.get("code") or "")
    known = _CODES.get(code) or _STATUSES.get(status, Code.UNKNOWN)
    return Failure(
        known,
        error_message(content),
        code.upper() or f"HTTP_{status}",
        None if error.get("param") is None else str(error["param"]),
        _retry_after_s(status, headers.get("retry-after")),
        status,
    )


def failure_of_event(error: Mapping[str, Any]) -> Failure | None:
    """Return the failure of a call that an error event ends; None where the error is the request's own end."""
    code = str(error.get("code") or "")
    if code not in _CODES:
        return None
    return Failure(_CODES[code], str(error.get("message", "")), code.upper(), http_status=200)


def error_message(content: bytes) -> str:
    """Return the message of an OpenAI error body; the body itself where it is none."""
    error = _error_in(content)
    return str(error["message"]) if "message" in error else content[:500].decode(errors="replace")


def _error_in(content: bytes) -> Mapping[str, Any]:
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _retry_after_s(status: int, given: str | None) -> float | None:
    try:
        return float(given) if given else (_RETRY_AFTER_S if status == 429 else None)
    except ValueError:  # a date
        return _RETRY_AFTER_S
