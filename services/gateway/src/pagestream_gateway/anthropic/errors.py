"""Errors in Anthropic's form: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.error_codes import error_report
from pagestream_gateway.errors import ContextExceeded, UnknownField, UnsupportedThread
from pagestream_gateway.openai.errors import error_headers, log_unexpected, writable

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_response(
    error: Exception, request_id: str | None = None, more_headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer that reports `error`; `request_id` where the request was accepted."""
    report = error_report(error)
    return JSONResponse(error_body(error, request_id), report.http_status, error_headers(report, more_headers))


def error_body(error: Exception, request_id: str | None) -> dict[str, Any]:
    """Return the body that Anthropic's clients know."""
    report = error_report(error)
    body = _body(report.http_status, _sentence(error) or report.message, request_id)
    if isinstance(error, UnsupportedThread):
        body["error"]["details"] = {"error_code": error.error_code}
    return body


def respond(request: Request, error: Exception) -> Response:
    """Answer an error that a route, or the search for one, raised."""
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        return JSONResponse(_body(error.status_code, message, None), error.status_code, error.headers)
    log_unexpected(error)
    return error_response(error)


def _sentence(error: Exception) -> str | None:
    """Return what Anthropic's API says of an error whose text clients read; None for others."""
    match error:
        case UnknownField(field=field):
            return f"{field}: Extra inputs are not permitted"
        case ContextExceeded(max_tokens=None):
            return f"prompt is too long: {error.num_tokens} tokens > {error.max_model_len - 1} maximum"
        case ContextExceeded():
            return (
                f"input length and `max_tokens` exceed context limit: {error.num_tokens} + {error.max_tokens} > "
                f"{error.max_model_len}, decrease input length or `max_tokens` and try again"
            )
    return None


def _body(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": writable(message)}, "request_id": request_id}
