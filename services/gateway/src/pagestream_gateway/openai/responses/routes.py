"""/v1/responses: create, read from any event, cancel, and list the input of a response.

A stored response keeps its conversation, and the items that later ones refer to by their ids.
"""

import asyncio
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import APIRouter
from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED, REQUEST_STATE_QUEUED
from pagestream.v1.records_pb2 import API_FORM_RESPONSES, RequestSpec
from pagestream_streams import RequestView
from pagestream_streams.errors import RequestNotFound
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.calls import CHAT, DISCONNECTED, OK, RESUME, Call
from pagestream_gateway.error_codes import error_report, rate_headers
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.callers import identify
from pagestream_gateway.http.documents import (
    FAILURE_HEADERS,
    FORM_NAME,
    FORM_SCHEMA,
    GENERATION_ERRORS,
    GENERATION_HEADERS,
    MODEL,
    QUEUE_HEADERS,
    REQUEST_HEADERS,
    Answers,
    AnswersByPath,
    body_of,
)
from pagestream_gateway.openai.generation import named_as, parsed_request, switch
from pagestream_gateway.openai.responses.answer import (
    IN_PROGRESS,
    ITEM_PREFIXES,
    QUEUED,
    ResponseAnswer,
    ResponseDeletion,
    ResponseEvent,
    ResponseInput,
    ResponseOutput,
    ResponseStream,
    ResponseWriter,
    StoredAnswer,
    WholeResponse,
    item_id,
    response_body,
)
from pagestream_gateway.openai.responses.body import REFERENCE, Item, ParsedResponse, ResponseBody, items_of, parse
from pagestream_gateway.request import Draft
from pagestream_gateway.streams.events import Position, Reading, request_headers, split_runs
from pagestream_gateway.streams.whole_answer import WholeAnswer

_INPUT_PREFIX = "item"
_MOST_RESPONSES, _MOST_ENTRIES = 512, 2**18  # that one request refers to: each log is read


class _Place(NamedTuple):
    """The part of a response that an item stands in."""

    response_id: str
    is_input: bool


async def stored_response(gateway: Gateway, response_id: str, tenant: str) -> RequestView:
    """Return the request of a response. Raises RequestNotFound, also for a request of another API."""
    view = await gateway.requests.view(response_id, tenant)
    answer = view.spec.answer
    if answer.api != API_FORM_RESPONSES or answer.response.unstored:
        raise RequestNotFound(response_id)
    return view


def input_of(spec: RequestSpec) -> list[Item]:
    """Return the conversation before a response's output, each item with an id."""
    items: list[Item] = json.loads(zlib.decompress(spec.answer.response.input_zlib))
    return [{"id": item_id(_INPUT_PREFIX, spec.request_id, number), **item} for number, item in enumerate(items)]


async def output_of(gateway: Gateway, view: RequestView) -> list[Item]:
    """Return the output of a response that has ended, as items of an input."""
    output = ResponseOutput(view.spec)
    with gateway.streams.entered():
        async with aclosing(gateway.requests.follow(view.spec)) as batches:
            async for batch in batches:
                for run in split_runs(0, batch):
                    if run.end is None:
                        output.feed(run)
    output.close_open_item()
    return items_of(output.items)


async def conversation_of(gateway: Gateway, response_id: str, tenant: str) -> list[Item]:
    """Return the input and output of a response that has ended. Raises InvalidRequest."""
    field = "previous_response_id"
    try:
        view = await stored_response(gateway, response_id, tenant)
    except RequestNotFound as error:
        raise InvalidRequest(field, f"{response_id[:200]!r} does not exist, or its log has expired") from error
    if view.state != REQUEST_STATE_FINISHED:
        raise InvalidRequest(field, "is of a response that has not ended")
    output = await output_of(gateway, view)
    return [*await gateway.pool.run(lambda: input_of(view.spec)), *output]


async def with_referred(gateway: Gateway, items: Sequence[Item], tenant: str) -> list[Item]:
    """Return items with those in place of the references that these stand for.

    The id of an item names its response, whose log is read: no index is kept. Raises InvalidRequest for an item that
    is not there, and for more responses or longer ones than one request may read.
    """
    places = {number: _place(number, item["id"]) for number, item in enumerate(items) if item["type"] == REFERENCE}
    wanted: dict[str, set[bool]] = {}
    for place in places.values():
        wanted.setdefault(place.response_id, set()).add(place.is_input)
    if len(wanted) > _MOST_RESPONSES:
        raise InvalidRequest("input", f"refers to items of {len(wanted)} responses, at most {_MOST_RESPONSES}")
    found: dict[_Place, dict[str, Item]] = {}
    num_entries = 0
    for response_id, kinds in wanted.items():
        try:
            view = await stored_response(gateway, response_id, tenant)
        except RequestNotFound:
            continue
        num_entries += view.next_index if False in kinds else 0
        if num_entries > _MOST_ENTRIES:
            raise InvalidRequest("input", f"refers to items of responses that have more than {_MOST_ENTRIES} tokens")
        if False in kinds and view.state == REQUEST_STATE_FINISHED:
            found[_Place(response_id, False)] = _by_id(await output_of(gateway, view))
        if True in kinds:
            asked = await gateway.pool.run(lambda spec=view.spec: input_of(spec))  # type: ignore[misc]
            found[_Place(response_id, True)] = _by_id(asked)
    return [
        _referred(number, item["id"], found.get(places[number], {})) if number in places else item
        for number, item in enumerate(items)
    ]


def _by_id(items: Iterable[Item]) -> dict[str, Item]:
    return {item["id"]: item for item in items}


def _referred(number: int, name: str, items: Mapping[str, Item]) -> Item:
    if name not in items:
        raise _not_found(number, name)
    return items[name]


def _place(number: int, name: str) -> _Place:
    """Return where an item stands by its id. Raises InvalidRequest for one that no response here has."""
    prefix, _, rest = name.partition("_")
    response_id, _, place = rest.rpartition("_")
    if prefix not in (*ITEM_PREFIXES.values(), _INPUT_PREFIX) or not response_id or not place.isdecimal():
        raise _not_found(number, name)
    return _Place(response_id, prefix == _INPUT_PREFIX)


def _not_found(number: int, name: str) -> InvalidRequest:
    return InvalidRequest(
        f"input.{number}.id",
        f"Item with id {name[:100]!r} not found: it is of no response that has ended and is stored. Send the item "
        "itself in place of the reference",
    )


_DEFAULT_LISTED, _MAX_LISTED = 20, 100
_RESPONSE = "/v1/responses/{response_id}"
_READ_PARAMETERS: dict[str, Any] = {
    "parameters": [
        {
            "name": "stream",
            "in": "query",
            "schema": {"type": "boolean", "default": False},
            "description": "Answer with the response's events, those that are still to come among them.",
        },
        {
            "name": "starting_after",
            "in": "query",
            "schema": {"type": "integer", "minimum": 0},
            "description": "The sequence_number of the last event that was seen; needs stream.",
        },
        {
            "name": "Last-Event-ID",
            "in": "header",
            "schema": {"type": "string"},
            "description": "The last stream_position that was seen: what stands before it must still be the same. "
            "Without starting_after the events after it are sent.",
        },
    ]
}
_LIST_PARAMETERS: dict[str, Any] = {
    "parameters": [
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_LISTED, "default": _DEFAULT_LISTED},
            "description": "Most items of the page.",
        },
        {
            "name": "order",
            "in": "query",
            "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
            "description": "From the first item, or from the last.",
        },
        {
            "name": "after",
            "in": "query",
            "schema": {"type": "string"},
            "description": "The id of the last item of the page before.",
        },
    ]
}


_RESPONSE_READ = Answers(
    ResponseAnswer, errors=(401, 404, 409, 429), headers={200: (*REQUEST_HEADERS, *QUEUE_HEADERS), **FAILURE_HEADERS}
)
_EXAMPLE = {"model": MODEL, "input": "Who lives in the lighthouse?", "max_output_tokens": 64}
ANSWERS: AnswersByPath = {
    ("post", "/v1/responses"): Answers(
        ResponseAnswer,
        (ResponseEvent,),
        has_lines=False,
        errors=GENERATION_ERRORS,
        headers=GENERATION_HEADERS,
        examples={
            "A question": _EXAMPLE,
            "A stream": {**_EXAMPLE, "stream": True},
            "An answer by a JSON schema": {
                **_EXAMPLE,
                "text": {"format": {"type": "json_schema", "name": FORM_NAME, "schema": FORM_SCHEMA, "strict": True}},
            },
        },
    ),
    ("get", _RESPONSE): _RESPONSE_READ._replace(
        events=(ResponseEvent,),
        has_lines=False,
        headers={200: (*REQUEST_HEADERS, *QUEUE_HEADERS, "X-Stream-Verified"), **FAILURE_HEADERS},
    ),
    ("post", f"{_RESPONSE}/cancel"): _RESPONSE_READ,
    ("delete", _RESPONSE): Answers(ResponseDeletion, errors=(401, 404)),
    ("get", f"{_RESPONSE}/input_items"): Answers(ResponseInput, errors=(401, 404)),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's routes. The id of another tenant's response is answered as an unknown one: 404."""
    routes = APIRouter(tags=["responses"])

    @routes.post("/v1/responses", openapi_extra=body_of(ResponseBody), summary="Answer a conversation as a response")
    async def create(request: Request) -> Response:
        call = gateway.calls.begin("responses", CHAT, request.headers)
        try:
            return await _create(gateway, request, call)
        except asyncio.CancelledError:
            call.end(DISCONNECTED)
            raise
        except Exception as error:
            call.end(error_report(error).code)
            raise

    @routes.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> Response:
        raise HTTPException(404, "conversations are not compacted here")

    @routes.get(_RESPONSE, openapi_extra=_READ_PARAMETERS, summary="A response, or its events from any of them on")
    async def retrieve(request: Request, response_id: str) -> Response:
        identity = await identify(gateway, request)
        is_stream = switch(request.query_params, "stream")
        after = _number(request.query_params.get("starting_after"), is_stream=is_stream)
        event_id = request.headers.get("last-event-id") if is_stream else None
        seen = None if event_id is None else Position.parse(event_id, response_id)
        view = await stored_response(gateway, response_id, identity.tenant)
        if seen is not None:
            place, digest = seen.next_index, seen.digest
            await gateway.requests.resume(response_id, identity.tenant, from_index=place, digest=digest)
        call = gateway.calls.begin("resume", RESUME, request.headers)
        call.identified(identity)
        call.resumed(view.spec)
        if not is_stream:
            return _state_answer(gateway, view, identity, call)
        return _stream(gateway, identity, call, ResponseWriter(view.spec, after, seen))

    @routes.delete(_RESPONSE, summary="End a response and forget it")
    async def delete(request: Request, response_id: str) -> Response:
        identity = await identify(gateway, request)
        await stored_response(gateway, response_id, identity.tenant)
        await gateway.discard(response_id, identity)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @routes.post(f"{_RESPONSE}/cancel", summary="End a response")
    async def cancel(request: Request, response_id: str) -> Response:
        identity = await identify(gateway, request)
        await stored_response(gateway, response_id, identity.tenant)
        await gateway.cancel(response_id, identity)
        view = await stored_response(gateway, response_id, identity.tenant)
        call = gateway.calls.begin("resume", RESUME, request.headers)
        call.identified(identity)
        call.resumed(view.spec)
        return _state_answer(gateway, view, identity, call)

    @routes.get(f"{_RESPONSE}/input_items", openapi_extra=_LIST_PARAMETERS, summary="The input of a response")
    async def input_items(request: Request, response_id: str) -> Response:
        tenant = (await identify(gateway, request)).tenant
        view = await stored_response(gateway, response_id, tenant)
        return await gateway.pool.run(lambda: _item_page(input_of(view.spec), request))

    return routes


async def _create(gateway: Gateway, request: Request, call: Call) -> Response:
    identity = await identify(gateway, request)
    call.identified(identity)
    async with parsed_request(gateway, request, parse) as parsed:
        with named_as(parsed.draft.field_names):
            spec = await gateway.submission.submit(await _draft(gateway, parsed, identity.tenant), identity, call)
    if parsed.draft.is_streamed:
        return _stream(gateway, identity, call, ResponseWriter(spec))
    if parsed.background:
        return _state_answer(gateway, await gateway.requests.view(spec.request_id, identity.tenant), identity, call)
    return WholeAnswer(gateway, Reading(spec, identity, call, ResponseWriter(spec), WholeResponse))


async def _draft(gateway: Gateway, parsed: ParsedResponse, tenant: str) -> Draft:
    """Return the draft with the conversation before it. Raises InvalidRequest for a response that can't go on."""
    max_bytes = gateway.settings.limits.max_body_bytes
    earlier = await conversation_of(gateway, parsed.previous_id, tenant) if parsed.previous_id else []
    if any(item["type"] == REFERENCE for item in parsed.items):
        parsed = replace(parsed, items=await with_referred(gateway, parsed.items, tenant))
    return await gateway.pool.run(lambda: parsed.going_on(earlier, max_bytes))


def _stream(gateway: Gateway, identity: Identity, call: Call, writer: ResponseWriter) -> Response:
    headers = {} if writer.is_verified else {"X-Stream-Verified": "false"}
    return ResponseStream(gateway, Reading(writer.spec, identity, call, writer, WholeResponse, headers=headers), writer)


def _state_answer(gateway: Gateway, view: RequestView, identity: Identity, call: Call) -> Response:
    """Return the whole response where it has ended, else what is known of it; ends the call, or lets the answer."""
    spec = view.spec
    if view.state == REQUEST_STATE_FINISHED:
        return StoredAnswer(gateway, Reading(spec, identity, call, ResponseWriter(spec), WholeResponse))
    call.end(OK)
    status = QUEUED if view.state == REQUEST_STATE_QUEUED else IN_PROGRESS
    body = json.dumps(response_body(spec, status))
    headers = {**request_headers(spec), **rate_headers(call.rates)}
    return Response(body, media_type="application/json", headers=headers)


def _item_page(items: list[Item], request: Request) -> Response:
    shown = list(items)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", f"must be asc or desc, got {order[:40]!r}")
    if order == "desc":
        shown.reverse()
    after, text = request.query_params.get("after"), request.query_params.get("limit", str(_DEFAULT_LISTED))
    if after is not None:
        names = [item["id"] for item in shown]
        if after not in names:
            raise InvalidRequest("after", f"{after[:100]!r} is not in the list; begin with its first page")
        shown = shown[names.index(after) + 1 :]
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 3 else 0
    if not 1 <= limit <= _MAX_LISTED:
        raise InvalidRequest("limit", f"expected a number from 1 to {_MAX_LISTED}, got {text[:40]!r}")
    page = shown[:limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(shown) > limit})


def _number(text: str | None, *, is_stream: bool) -> int:
    """Return the number of the last event that a reader has; -1 for none."""
    if text is None:
        return -1
    if not is_stream:
        raise InvalidRequest("starting_after", "needs stream=true")
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise InvalidRequest("starting_after", f"expected the number of an event (0 or more), got {text[:40]!r}")
    return int(text)
