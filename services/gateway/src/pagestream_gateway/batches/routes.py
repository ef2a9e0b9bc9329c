"""/v1/batches: create, list, read and cancel batches."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter
from pagestream_batches.batches import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    ERRORS,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    OUTPUT,
    Batch,
)
from pagestream_batches.errors import BatchNotFound
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.batches.files import PURPOSE, ExpiresAfter, list_body, listed
from pagestream_gateway.batches.jobs import BatchAbout, about_of
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import Body, parse_body
from pagestream_gateway.http.callers import identify
from pagestream_gateway.http.documents import CHAT_EXAMPLE, Answers, AnswersByPath, body_of
from pagestream_gateway.openai.generation import parsed_request

_DEFAULT_LISTED, _MAX_LISTED = 20, 100
_BATCH = "/v1/batches/{batch_id}"
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_WINDOW_S = 7 * 86400  # as long as a request may be given over HTTP
_MOST_METADATA, _MOST_KEY_CHARS, _MOST_VALUE_CHARS = 16, 64, 512  # OpenAI's
_TIMES = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED)
_LIST_PARAMETERS: dict[str, Any] = {
    "parameters": [
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_LISTED, "default": _DEFAULT_LISTED},
            "description": "Most batches of the page.",
        },
        {
            "name": "after",
            "in": "query",
            "schema": {"type": "string"},
            "description": "The id of the last batch of the page before.",
        },
    ]
}


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: str | None = Field(None, description="The file with a job in each line.")
    requests: list[dict[str, Any]] | None = Field(
        None, description="The jobs themselves, each in the form of a line, in place of a file."
    )
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] = Field(
        description="What the jobs are calls of."
    )
    completion_window: str = Field("24h", description="After that jobs that have no result are ended: 1s to 7d.")
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = Field(None, description="When the files expire that the batch writes.")


@dataclass(frozen=True)
class ParsedBatch:
    """A body, with its jobs as lines."""

    body: BatchBody
    window_s: int
    lines: bytes


def parse(document: dict[str, Any], _: Mapping[str, str]) -> ParsedBatch:
    """Read a body. Raises InvalidRequest."""
    body = parse_body(BatchBody, document)
    if (body.input_file_id is None) == (body.requests is None):
        raise InvalidRequest("input_file_id", "exactly one of input_file_id and requests must be given")
    window = _WINDOW.fullmatch(body.completion_window)
    window_s = int(window[1]) * _SECONDS[window[2]] if window else 0
    if not 1 <= window_s <= _MOST_WINDOW_S:
        shown = body.completion_window[:40]
        raise InvalidRequest("completion_window", f'expected 1s to 7d, such as "24h", got {shown!r}')
    metadata = body.metadata or {}
    if len(metadata) > _MOST_METADATA:
        raise InvalidRequest("metadata", f"at most {_MOST_METADATA} members, got {len(metadata)}")
    if any(len(key) > _MOST_KEY_CHARS or len(value) > _MOST_VALUE_CHARS for key, value in metadata.items()):
        most = f"{_MOST_KEY_CHARS} characters, a value {_MOST_VALUE_CHARS}"
        raise InvalidRequest("metadata", f"a name has at most {most}")
    lines = "".join(json.dumps(each) + "\n" for each in body.requests or ())
    return ParsedBatch(body, window_s, lines.encode())


class BatchCounts(BaseModel):
    """Jobs of a batch."""

    total: int = Field(description="0 before they are counted.")
    completed: int
    failed: int


class BatchUsage(BaseModel):
    """Tokens of a batch's jobs."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class BatchAnswer(BaseModel):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: dict[str, Any] | None = Field(description="Why it has failed, by lines.")
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None = Field(description="The results; null before the end, and where there is none.")
    error_file_id: str | None = Field(description="The jobs that have an error in place of a result; likewise.")
    created_at: int
    expires_at: int = Field(description="The end of its completion window.")
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None
    usage: BatchUsage
    waits_for: str | None = Field(description="The error's code that keeps further jobs waiting now.")


class BatchList(BaseModel):
    """A page of a tenant's batches, newest first."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


ANSWERS: AnswersByPath = {
    ("post", "/v1/batches"): Answers(
        BatchAnswer,
        errors=(401, 404, 413, 415, 429),
        examples={
            "Two jobs": {
                "endpoint": "/v1/chat/completions",
                "requests": [{"custom_id": each, "body": CHAT_EXAMPLE} for each in ("first", "second")],
            },
            "The jobs of a file": {"endpoint": "/v1/chat/completions", "input_file_id": "file-0123456789abcdef"},
        },
    ),
    ("get", "/v1/batches"): Answers(BatchList, errors=(401,)),
    ("get", "/v1/batches/{batch_id}"): Answers(BatchAnswer, errors=(401, 404)),
    ("post", "/v1/batches/{batch_id}/cancel"): Answers(BatchAnswer, errors=(401, 404, 409)),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's routes. The id of another tenant's batch is answered as an unknown one: 404."""
    routes = APIRouter(tags=["batches"])

    @routes.post("/v1/batches", openapi_extra=body_of(BatchBody), summary="Run the jobs of a file, or of this body")
    async def create(request: Request) -> Response:
        identity = await identify(gateway, request)
        async with parsed_request(gateway, request, parse) as parsed:
            return JSONResponse(batch_body(await _create(gateway, identity, parsed)))

    @routes.get("/v1/batches", openapi_extra=_LIST_PARAMETERS, summary="The caller's batches, newest first")
    async def list_batches(request: Request) -> Response:
        tenant, after = (await identify(gateway, request)).tenant, request.query_params.get("after", "")
        limit = listed(request.query_params.get("limit"), _DEFAULT_LISTED, _MAX_LISTED)
        try:
            page = await gateway.limit.wait(gateway.batches.registry.page(tenant, limit=limit, after=after))
        except BatchNotFound as error:
            raise InvalidRequest("after", f"{after[:100]!r} is not in the list; begin with its first page") from error
        return JSONResponse(list_body([batch_body(each) for each in page.batches], has_more=page.has_more))

    @routes.get(_BATCH, summary="Where a batch stands")
    async def retrieve(request: Request, batch_id: str) -> Response:
        tenant = (await identify(gateway, request)).tenant
        return JSONResponse(batch_body(await gateway.limit.wait(gateway.batches.registry.get(tenant, batch_id))))

    @routes.post(f"{_BATCH}/cancel", summary="End a batch and its jobs")
    async def cancel(request: Request, batch_id: str) -> Response:
        tenant = (await identify(gateway, request)).tenant
        batch = await gateway.limit.wait(gateway.batches.registry.cancel(tenant, batch_id))
        gateway.batches.changed.set()
        return JSONResponse(batch_body(batch))

    return routes


async def _create(gateway: Gateway, identity: Identity, parsed: ParsedBatch) -> Batch:
    body, settings = parsed.body, gateway.settings.batches
    lifetime_s = settings.file_lifetime_s
    about = BatchAbout(
        endpoint=body.endpoint,
        window=body.completion_window,
        identity=identity,
        output_lifetime_s=lifetime_s if body.output_expires_after is None else body.output_expires_after.seconds,
        metadata=body.metadata,
    )
    file_id = body.input_file_id
    if file_id is None:
        async with gateway.batches.uploads.begun(identity.tenant) as upload:
            await upload.write(parsed.lines)
            file = await upload.end(name="requests.jsonl", purpose=PURPOSE, lifetime_s=lifetime_s)
        file_id = file.file_id
    creating = gateway.batches.registry.create(identity.tenant, file_id, about=about.dumped(), window_s=parsed.window_s)
    batch = await gateway.limit.wait(creating)
    gateway.batches.changed.set()
    return batch


def batch_body(batch: Batch) -> dict[str, Any]:
    """Return OpenAI's object of a batch, and what its jobs wait for."""
    about = about_of(batch.about)
    times = {name: batch.times_ms[name] // 1000 if name in batch.times_ms else None for name in _TIMES}
    tokens = batch.tokens
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": about.endpoint,
        "errors": {"object": "list", "data": _errors(batch)} if batch.problems else None,
        "input_file_id": batch.input_file_id,
        "completion_window": about.window,
        "status": batch.status,
        "output_file_id": batch.file_ids.get(OUTPUT) if batch.has_ended else None,
        "error_file_id": batch.file_ids.get(ERRORS) if batch.has_ended else None,
        "created_at": batch.times_ms["created"] // 1000,
        "expires_at": batch.times_ms["expires"] // 1000,
        **{f"{name}_at": at for name, at in times.items()},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": about.metadata,
        "usage": {
            "input_tokens": tokens.prompt,
            "input_tokens_details": {"cached_tokens": tokens.cached},
            "output_tokens": tokens.output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens.prompt + tokens.output,
        },
        "waits_for": batch.waits_for or None,
    }


def _errors(batch: Batch) -> list[dict[str, Any]]:
    return [
        {"code": each["code"], "message": each["message"], "param": each["field"], "line": each["line"]}
        for each in json.loads(batch.problems)
    ]
