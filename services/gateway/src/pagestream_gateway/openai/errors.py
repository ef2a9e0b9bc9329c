"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pagestream_streams.errors import StreamsError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from pagestream_gateway.error_codes import INTERNAL_ERROR, ErrorReport, error_report
from pagestream_gateway.errors import GatewayError

_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
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
    headers = {**report.headers, **(more_headers or {})}
    if report.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(report.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(report.retry_after_s * 1000)))
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
        path = request.scope["path"]
        form = next((form for place, form in others.items() if f"{path}/".startswith(f"{place}/")), _respond)
        response = form(request, error)
        if response.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            response.headers["Allow"] = ", ".join(_allowed_methods(app, request))
        return response

    for kind in (GatewayError, StreamsError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _allowed_methods(app: FastAPI, request: Request) -> list[str]:
    """Return the methods that the path has. A route of the framework names its own alone, not those beside it."""
    calls = {method: {**request.scope, "method": method} for method in _METHODS}
    routes = app.router.routes
    return [method for method, call in calls.items() if any(each.matches(call)[0] is Match.FULL for each in routes)]


def _respond(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        return JSONResponse(body, error.status_code, error.headers)
    log_unexpected(error)
    return error_response(error)


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None = Field(description="The part of the request that is wrong.")
    code: str | None = Field(description="A stable word for the error.")


class ErrorAnswer(BaseModel):
    """OpenAI's form of an error."""

    error: ErrorDetail


class ErrorEvent(ErrorAnswer):
    """The data of the event with which a stream ends that could not go on here."""

    stream_position: str = Field(description="The Last-Event-ID with which a reader goes on, on any gateway.")
