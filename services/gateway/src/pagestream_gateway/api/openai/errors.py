"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

import json
import logging
import math
from typing import Any

from fastapi import FastAPI
from pagestream_streams.errors import StreamsError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.core.problems import Problem, problem_of
from pagestream_gateway.errors import GatewayError

logger = logging.getLogger(__name__)


def error_body(problem: Problem) -> dict[str, Any]:
    """The body that OpenAI's clients know."""
    field = None if problem.field is None else _writable(problem.field)
    message = _writable(problem.message)
    return {"error": {"message": message, "type": problem.kind, "param": field, "code": problem.code}}


def _writable(text: str) -> str:
    """`text` with halves of surrogate pairs, which JSON can spell and UTF-8 can't, in escaped form."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_response(error: Exception, request_id: str = "") -> Response:
    """The answer that tells `error`, with Retry-After where a retry may help."""
    problem = problem_of(error)
    headers: dict[str, str] = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    if problem.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if request_id:
        headers["X-Request-Id"] = request_id
    return JSONResponse(error_body(problem), problem.http_status, headers)


def error_data(error: Exception) -> str:
    """The same as the data of a stream's event."""
    return json.dumps(error_body(problem_of(error)))


def log_unexpected(error: Exception, request_id: str = "") -> None:
    """Writes faults of ours to the log, with their trace; what is the caller's fault is not logged."""
    if problem_of(error).code == "internal_error":
        logger.error("request failed", exc_info=error, extra={"request_id": request_id})


def install_handlers(app: FastAPI) -> None:
    """Gives every error of `app` OpenAI's form."""

    async def known(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def unexpected(_: Request, error: Exception) -> Response:
        log_unexpected(error)
        return error_response(error)

    async def routing(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return error_response(error)
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        return JSONResponse(body, error.status_code, error.headers)

    app.add_exception_handler(GatewayError, known)
    app.add_exception_handler(StreamsError, known)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(Exception, unexpected)
