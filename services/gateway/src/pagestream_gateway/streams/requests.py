"""/v1/requests: a tenant's requests, and of each its state, answer, events from any position, end and return.

An answer has the form of the API that accepted its request.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from fastapi import APIRouter
from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED, RequestState, Usage
from pagestream.v1.records_pb2 import (
    API_FORM_CHAT_COMPLETIONS,
    API_FORM_CLASSIFY,
    API_FORM_EMBEDDINGS,
    API_FORM_MESSAGES,
    API_FORM_RERANK,
    API_FORM_RESPONSES,
    API_FORM_SCORE,
    RequestSpec,
)
from pagestream_streams import RequestSummary, RequestView
from pagestream_streams.errors import DigestMismatch, OffsetOutOfRange, RequestNotFound
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.anthropic import body as messages
from pagestream_gateway.anthropic.answer import (
    MESSAGE_REFUSALS,
    MessageAnswer,
    MessageEvent,
    MessageStream,
    MessageWriter,
    WholeMessage,
    WholeMessageAnswer,
)
from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.calls import DISCONNECTED, OK, RESUME
from pagestream_gateway.error_codes import error_report
from pagestream_gateway.errors import AnswerTooLarge, GenerationFailed, InvalidRequest, Overloaded
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.callers import identify
from pagestream_gateway.http.documents import (
    ANTHROPIC_FAILURE_HEADERS,
    CHAT_EXAMPLE,
    GENERATION_ERRORS,
    QUEUE_HEADERS,
    READ_HEADERS,
    REQUEST_HEADERS,
    Answers,
    AnswersByPath,
    body_of,
)
from pagestream_gateway.openai import chat as chat_completions
from pagestream_gateway.openai import completions, embeddings, scoring
from pagestream_gateway.openai.chat import ChatAnswer, ChatChunk, ChatWriter
from pagestream_gateway.openai.completions import CompletionAnswer, CompletionChunk, CompletionWriter
from pagestream_gateway.openai.embeddings import EmbeddingAnswer, EmbeddingEvent, EmbeddingList, EmbeddingWriter
from pagestream_gateway.openai.errors import ErrorEvent, error_response
from pagestream_gateway.openai.generation import (
    UsageSchema,
    WholeBody,
    finish_reason_body,
    parsed_request,
    switch,
    usage_body,
)
from pagestream_gateway.openai.responses.answer import ResponseAnswer, ResponseWriter, StoredAnswer, WholeResponse
from pagestream_gateway.openai.scoring import (
    ClassificationWriter,
    RerankAnswer,
    RerankWriter,
    ScoreAnswer,
    ScoreList,
    ScoreWriter,
)
from pagestream_gateway.request import Draft
from pagestream_gateway.streams.events import (
    AnswerBody,
    EventStream,
    LogWriter,
    Position,
    Reading,
    accepts_lines,
    failure,
    is_failed,
    learn_tokens,
    request_headers,
)
from pagestream_gateway.streams.whole_answer import WholeAnswer


class AnswerKind(NamedTuple):
    """The classes that make the answer of an API."""

    writer: type[LogWriter]
    """Of the whole answer."""
    body: type[AnswerBody]
    events: type[LogWriter]
    """The writer of its events when it is read on."""
    whole: type[WholeAnswer] = WholeAnswer


_KINDS: Mapping[int, AnswerKind] = {
    API_FORM_CHAT_COMPLETIONS: AnswerKind(ChatWriter, WholeBody, ChatWriter),
    API_FORM_RESPONSES: AnswerKind(ResponseWriter, WholeResponse, ChatWriter, StoredAnswer),
    API_FORM_MESSAGES: AnswerKind(MessageWriter, WholeMessage, MessageWriter, WholeMessageAnswer),
    API_FORM_EMBEDDINGS: AnswerKind(EmbeddingWriter, EmbeddingList, EmbeddingWriter),
    API_FORM_CLASSIFY: AnswerKind(ClassificationWriter, EmbeddingList, ClassificationWriter),
    API_FORM_SCORE: AnswerKind(ScoreWriter, ScoreList, ScoreWriter),
    API_FORM_RERANK: AnswerKind(RerankWriter, ScoreList, RerankWriter),
}


def kind_of(spec: RequestSpec) -> AnswerKind:
    """Return what makes a request's answer; that of gRPC is read as a completion."""
    return _KINDS.get(spec.answer.api, AnswerKind(CompletionWriter, WholeBody, CompletionWriter))


_RETRY_AFTER_S = 5.0


async def collect(gateway: Gateway, spec: RequestSpec, *, max_bytes: int) -> tuple[bytes, Usage]:
    """Return a request's answer as its API would have given it, and its usage. It follows a log that has not ended.

    The bytes are part of what whole answers may take in this process; they are waited for.

    Raises:
        GenerationFailed: the log ended with an error.
        AnswerTooLarge: the answer has more than `max_bytes` bytes, about.
        Overloaded: other answers take the memory.
        RequestNotFound, Unavailable: as the log's reader.
    """
    budget = gateway.answer_budget
    num_bytes = min(max_bytes, budget.limit_bytes)
    kind = kind_of(spec)
    writer = kind.writer(spec)
    await learn_tokens(gateway, writer)
    limit_s = gateway.settings.stream.whole_answer_wait_s
    try:
        async with asyncio.timeout(limit_s):
            await budget.acquire(num_bytes)
    except TimeoutError as error:
        raise Overloaded(f"other answers have used this gateway's memory for {limit_s:g} s", _RETRY_AFTER_S) from error
    try:
        return await _collect(gateway, spec, writer, kind.body, num_bytes)
    finally:
        budget.release(num_bytes)


async def _collect(
    gateway: Gateway, spec: RequestSpec, writer: LogWriter, kind: type[AnswerBody], max_bytes: int
) -> tuple[bytes, Usage]:
    body, next_index = kind(writer), 0
    async with aclosing(gateway.requests.follow(spec)) as batches:
        async for batch in batches:
            for run in writer.split(next_index, batch):
                next_index = run.next_index
                if run.end is None:
                    body.add(run)
                    continue
                if is_failed(spec, run.end):
                    raise failure(spec, run.end)
                fingerprint = await gateway.requests.fingerprint(spec)
                writer.set_fingerprint(fingerprint)
                body.set_fingerprint(fingerprint)
                return b"".join(body.serialize(run.end)), run.end.usage
            if body.num_bytes > max_bytes:
                raise AnswerTooLarge(spec.request_id, max_bytes)
    raise GenerationFailed("log_without_end", "the log ended without its finish record")


_DEFAULT_LISTED, _MAX_LISTED = 20, 100
_ANSWER_RETRY_S = "1"  # after which the answer to a request that runs may be asked for again

_EVENTS_PARAMETERS: dict[str, Any] = {
    "parameters": [
        {
            "name": "Last-Event-ID",
            "in": "header",
            "schema": {"type": "string"},
            "description": "The stream_position of the last event that was seen: `<request id>/<next index>/<digest>`.",
        },
        {
            "name": "from",
            "in": "query",
            "schema": {"type": "integer", "minimum": 0},
            "description": "The index of the first log entry wanted. Neither this nor Last-Event-ID: from the start.",
        },
        {
            "name": "queue_comments",
            "in": "query",
            "schema": {"type": "boolean", "default": False},
            "description": "Say where the request stands as comments of the stream, until its first token.",
        },
    ]
}
LIST_PARAMETERS: dict[str, Any] = {
    "parameters": [
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_LISTED, "default": _DEFAULT_LISTED},
            "description": "Most requests of the page.",
        },
        {
            "name": "after",
            "in": "query",
            "schema": {"type": "string"},
            "description": "The id of the last request of the page before.",
        },
    ]
}
_PARSERS: Mapping[str, Callable[[dict[str, Any], Mapping[str, str]], Draft]] = {
    "messages": chat_completions.parse,
    "input": embeddings.parse,
    "query": scoring.parse_rerank,
    "text_1": scoring.parse_score,
    "data_1": scoring.parse_score,
    "queries": scoring.parse_score,
}
_AGAIN: dict[str, Any] = {
    **body_of(
        completions.CompletionBody,
        chat_completions.ChatBody,
        messages.MessageBody,
        embeddings.EmbeddingBody,
        scoring.ScoreBody,
        scoring.RerankBody,
    ),
    "parameters": [
        {
            "name": "anthropic-version",
            "in": "header",
            "schema": {"type": "string"},
            "description": "Any value: `messages` are a body of /v1/messages, not of chat completions.",
        },
        {
            "name": "X-Request-Seed",
            "in": "header",
            "schema": {"type": "integer"},
            "description": "This header of the first answer; may be left out where the body has a seed.",
        },
    ],
}


class RequestItem(BaseModel):
    """A request in the list of its tenant's."""

    id: str
    model: str
    created: int = Field(description="Unix seconds of its acceptance, by Redis' clock.")
    state: Literal["queued", "running", "finished"]
    finish_reason: str | None
    next_index: int
    usage: UsageSchema
    attempts: int


class RequestList(BaseModel):
    """A page of a tenant's requests, newest first."""

    object: Literal["list"]
    data: list[RequestItem]
    has_more: bool


class RequestAnswer(BaseModel):
    """Where a request stands."""

    id: str
    model: str
    state: Literal["queued", "running", "finished"]
    queue_position: int | None = Field(description="Requests before it; null unless queued.")
    expected_wait_ms: int | None = Field(
        description="Until an engine takes it, by the measured rate; null for unknown."
    )
    finish_reason: str | None
    next_index: int
    usage: UsageSchema
    attempts: int
    client_request_id: str | None = Field(description="The caller's own id.")


_REQUEST = "/v1/requests/{request_id}"
_REQUEST_READ = Answers(RequestAnswer, errors=(401, 404), headers=READ_HEADERS)
_WHOLE_ANSWERS = (
    CompletionAnswer,
    ChatAnswer,
    ResponseAnswer,
    MessageAnswer,
    EmbeddingAnswer,
    ScoreAnswer,
    RerankAnswer,
)
ANSWERS: AnswersByPath = {
    ("get", "/v1/requests"): Answers(RequestList, errors=(401,)),
    ("get", _REQUEST): _REQUEST_READ,
    ("put", _REQUEST): _REQUEST_READ._replace(
        errors=GENERATION_ERRORS, examples={"The chat that it was": {**CHAT_EXAMPLE, "seed": 0}}
    ),
    ("delete", _REQUEST): _REQUEST_READ,
    ("get", f"{_REQUEST}/answer"): Answers(
        one_of=_WHOLE_ANSWERS,
        unfinished=RequestAnswer,
        errors=(401, 404, 409, 429),
        headers={
            200: (*REQUEST_HEADERS, "request-id"),
            202: (*REQUEST_HEADERS, "Retry-After"),
            404: REQUEST_HEADERS,
            **ANTHROPIC_FAILURE_HEADERS,
        },
        refusals=MESSAGE_REFUSALS,
    ),
    ("get", f"{_REQUEST}/events"): Answers(
        events=(
            ChatChunk,
            CompletionChunk,
            MessageEvent,
            EmbeddingEvent,
            EmbeddingAnswer,
            ScoreAnswer,
            RerankAnswer,
            ErrorEvent,
        ),
        errors=(401, 404, 409, 416),
        headers={200: (*REQUEST_HEADERS, "request-id", *QUEUE_HEADERS, "X-Stream-Verified")},
    ),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's routes. The id of another tenant's request is answered as an unknown one: 404."""
    routes = APIRouter(tags=["requests"])

    @routes.get("/v1/requests", openapi_extra=LIST_PARAMETERS, summary="The caller's requests, newest first")
    async def list_requests(request: Request) -> Response:
        tenant = (await identify(gateway, request)).tenant
        limit, after = listed_limit(request.query_params.get("limit")), request.query_params.get("after", "")
        try:
            page = await gateway.requests.list(tenant, limit=limit, after=after)
        except RequestNotFound as error:
            raise InvalidRequest("after", f"{after[:100]!r} is not in the list; begin with its first page") from error
        return JSONResponse(
            {"object": "list", "data": [summary_body(each) for each in page.requests], "has_more": page.has_more}
        )

    @routes.get(_REQUEST, summary="Where a request stands")
    async def get_request(request: Request, request_id: str) -> Response:
        tenant = (await identify(gateway, request)).tenant
        return _view_answer(await gateway.requests.view(request_id, tenant))

    @routes.put(
        _REQUEST,
        openapi_extra=_AGAIN,
        summary="Accept a request again that Redis has lost; one that is there stays as it is",
    )
    async def accept_again(request: Request, request_id: str) -> Response:
        call = gateway.calls.begin("accept_again", "", request.headers)
        outcome = DISCONNECTED
        try:
            identity = await identify(gateway, request)
            call.identified(identity)
            async with parsed_request(gateway, request, _parse_any) as given:
                draft = replace(given, chosen_seed=_seed(request.headers.get("x-request-seed"), given))
                await gateway.submission.submit_again(draft, identity, request_id, call, is_compared=True)
            view = await gateway.requests.view(request_id, identity.tenant)
            outcome = OK
        except Exception as error:
            outcome = error_report(error).code
            raise
        finally:
            call.end(outcome)
        return _view_answer(view)

    @routes.delete(_REQUEST, summary="End a request")
    async def cancel_request(request: Request, request_id: str) -> Response:
        identity = await identify(gateway, request)
        await gateway.cancel(request_id, identity)
        return _view_answer(await gateway.requests.view(request_id, identity.tenant))

    @routes.get(
        f"{_REQUEST}/answer",
        summary="A finished request's whole answer, in the form of the API that accepted it",
    )
    async def whole_answer(request: Request, request_id: str) -> Response:
        identity = await identify(gateway, request)
        return _whole_answer(gateway, request, identity, await gateway.requests.view(request_id, identity.tenant))

    @routes.get(
        f"{_REQUEST}/events",
        openapi_extra=_EVENTS_PARAMETERS,
        summary="A request's events from an offset",
    )
    async def events(request: Request, request_id: str) -> Response:
        identity = await identify(gateway, request)
        position = _position(request, request_id)
        with_comments = switch(request.query_params, "queue_comments")
        try:
            view, is_complete = await gateway.requests.resume(
                request_id, identity.tenant, from_index=position.next_index, digest=position.digest
            )
            if position.digest and not position.next_index:  # nothing is before the start
                raise DigestMismatch(request_id, 0)
        except (OffsetOutOfRange, DigestMismatch) as error:
            return error_response(error, field=position.source)
        with_opening = request.headers.get("last-event-id") is None and position.next_index == 0
        call = gateway.calls.begin("resume", RESUME, request.headers)
        call.identified(identity)
        call.resumed(view.spec)
        reading = Reading(
            view.spec,
            identity,
            call,
            writer_of(view.spec),
            kind_of(view.spec).body,
            start=position,
            with_opening=with_opening,
            as_lines=accepts_lines(request.headers.get("accept")),
            with_queue_comments=with_comments,
            is_complete=is_complete,
            headers={"X-Stream-Verified": "true" if position.is_verified else "false"},
        )
        stream = MessageStream if view.spec.answer.api == API_FORM_MESSAGES else EventStream
        return stream(gateway, reading)

    return routes


def _whole_answer(gateway: Gateway, request: Request, identity: Identity, view: RequestView) -> Response:
    if view.state != REQUEST_STATE_FINISHED:
        return _view_answer(view, 202, {"Retry-After": _ANSWER_RETRY_S})
    call = gateway.calls.begin("resume", RESUME, request.headers)
    call.identified(identity)
    call.resumed(view.spec)
    kind = kind_of(view.spec)
    return kind.whole(gateway, Reading(view.spec, identity, call, kind.writer(view.spec), kind.body))


def writer_of(spec: RequestSpec) -> LogWriter:
    """Return what writes a request's answer in the form that it was asked for in; gRPC's is read as a completion."""
    return kind_of(spec).events(spec)


def _position(request: Request, request_id: str) -> Position:
    """Return where to read on. Last-Event-ID wins: a reconnecting EventSource adds it to the URL it began with."""
    last_event_id = request.headers.get("last-event-id")
    if last_event_id is not None:
        return Position.parse(last_event_id, request_id)
    text = request.query_params.get("from")
    return Position() if text is None else Position.parse_index(text)


def listed_limit(text: str | None) -> int:
    """Return the number of listed requests that a query asks for. Raises InvalidRequest."""
    if text is None:
        return _DEFAULT_LISTED
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_LISTED)) else 0
    if not 1 <= number <= _MAX_LISTED:
        raise InvalidRequest("limit", f"expected a number from 1 to {_MAX_LISTED}, got {text[:40]!r}")
    return number


def _parse_any(document: dict[str, Any], headers: Mapping[str, str]) -> Draft:
    """Read a body of any resource, which is known by a field that it alone has, or by Anthropic's header."""
    if "messages" in document and "anthropic-version" in headers:
        return messages.parse(document, headers)
    for name, parse in _PARSERS.items():
        if name in document:
            return parse(document, headers)
    return completions.parse(document, headers)


def _seed(text: str | None, draft: Draft) -> int | None:
    """Return the seed that a gateway chose: None where the body has its own."""
    own = draft.sampling.seed if draft.sampling.HasField("seed") else None
    if text is None:
        if own is None:
            raise InvalidRequest("X-Request-Seed", "is needed: repeat this header of the first answer")
        return None
    try:
        seed = int(text[:40])
    except ValueError as error:
        raise InvalidRequest("X-Request-Seed", f"must be a whole number, got {text[:40]!r}") from error
    if not -(2**63) <= seed < 2**63 or own not in (None, seed):
        expected = "a number of 64 bits" if own is None else f"the body's seed, {own}"
        raise InvalidRequest("X-Request-Seed", f"must be {expected}, got {seed}")
    return seed if own is None else None


def view_body(view: RequestView) -> dict[str, Any]:
    """Return what shows where a request stands."""
    return {
        "id": view.request_id,
        "model": view.model,
        "state": _state_name(view.state),
        "queue_position": view.queue_position,
        "expected_wait_ms": view.expected_wait_ms,
        "finish_reason": finish_reason_body(view.finish_reason),
        "next_index": view.next_index,
        "usage": usage_body(view.usage),
        "attempts": view.attempts,
        "client_request_id": view.spec.client_request_id or None,
    }


def _view_answer(view: RequestView, status: int = 200, more_headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(view_body(view), status, {**request_headers(view.spec), **(more_headers or {})})


def summary_body(summary: RequestSummary) -> dict[str, Any]:
    """Return what a list shows of a request."""
    return {
        "id": summary.request_id,
        "model": summary.model,
        "created": int(summary.accepted_at),
        "state": _state_name(summary.state),
        "finish_reason": finish_reason_body(summary.finish_reason),
        "next_index": summary.next_index,
        "usage": usage_body(summary.usage),
        "attempts": summary.attempts,
    }


def _state_name(state: RequestState) -> str:
    return RequestState.Name(state).removeprefix("REQUEST_STATE_").lower()
