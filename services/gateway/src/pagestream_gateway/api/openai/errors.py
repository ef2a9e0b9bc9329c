"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from pagestream_streams.errors import StreamsError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.api.error_codes import INTERNAL_ERROR, ErrorReport, error_report
from pagestream_gateway.errors import GatewayError

logger = logging.getLogger(__name__)
ErrorForm = Callable[[Request, Exception], Response]
"""Makes the answer to an error that a route, or the search for one, raised."""


def error_body(report: ErrorReport) -> dict[str, Any]:
    """Return the body that OpenAI's clients know."""
    field = None if report.field is None else writable(report.field)
    message = writable(report.message)
    return {"error": {"message": message, "type": report.type, "param": field, "code": report.code}}


def writable(text: str) -> str:
    """Escape halves of surrogate pairs, which JSON can spell and UTF-8 can't encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_response(
    error: Exception, more_headers: Mapping[str, str] | None = None, *, field: str | None = None
) -> Response:
    """Return the answer that reports `error`, with Retry-After where a retry may succeed.

    `field`: the part of the request that is wrong, in place of the one that the error names.
    """
    report = error_report(error)
    if field is not None:
        report = replace(report, field=field)
    return JSONResponse(error_body(report), report.http_status, error_headers(report, more_headers))


def error_headers(report: ErrorReport, more_headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the headers of an answer that reports an error."""
    headers = dict(more_headers or {})
    if report.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(report.retry_after_s)))
    if report.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_data(error: Exception, stream_position: str) -> str:
    """Return the error's body as the data of a stream's event, with the position from which a reader resumes."""
    return json.dumps({**error_body(error_report(error)), "stream_position": stream_position})


def log_unexpected(error: Exception, request_id: str = "") -> None:
    """Log a defect of the gateway with its traceback; errors that the caller caused are not logged."""
    if error_report(error).code == INTERNAL_ERROR:
        logger.error("request failed", exc_info=error, extra={"request_id": request_id})


def install_error_handlers(app: FastAPI, others: Mapping[str, ErrorForm]) -> None:
    """Answer every error of `app` in OpenAI's form, but at and below the paths of `others` in theirs."""

    async def answer(request: Request, error: Exception) -> Response:
        path = request.url.path
        form = next((form for place, form in others.items() if f"{path}/".startswith(f"{place}/")), _respond)
        return form(request, error)

    for kind in (GatewayError, StreamsError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _respond(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        return JSONResponse(body, error.status_code, error.headers)
    log_unexpected(error)
    return error_response(error)
