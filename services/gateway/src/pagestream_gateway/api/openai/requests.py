"""/v1/requests/<id>: an accepted request's state, its events from any position, and its end."""

from typing import Any

from fastapi import APIRouter
from pagestream.v1.inference_pb2 import RequestState
from pagestream.v1.records_pb2 import API_FORM_CHAT_COMPLETIONS, RequestSpec
from pagestream_streams import RequestView
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.api.openai.answers import Reading
from pagestream_gateway.api.openai.chat_completions import ChatWriter
from pagestream_gateway.api.openai.completions import CompletionWriter
from pagestream_gateway.api.openai.position import Position
from pagestream_gateway.api.openai.streaming import EventStream
from pagestream_gateway.api.openai.writer import AnswerWriter, finish_reason_body, usage_body
from pagestream_gateway.core.calls import RESUME
from pagestream_gateway.core.gateway import Gateway

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
    ]
}


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's routes. The id of another tenant's request is answered as an unknown one: 404."""
    routes = APIRouter(tags=["requests"])

    @routes.get("/v1/requests/{request_id}", summary="Where a request stands")
    async def get_request(request: Request, request_id: str) -> Response:
        tenant = gateway.tenant(request.headers.get("authorization"))
        return JSONResponse(_view_body(await gateway.requests.view(request_id, tenant)))

    @routes.delete("/v1/requests/{request_id}", summary="End a request")
    async def cancel_request(request: Request, request_id: str) -> Response:
        tenant = gateway.tenant(request.headers.get("authorization"))
        await gateway.requests.cancel(request_id, tenant)
        return JSONResponse(_view_body(await gateway.requests.view(request_id, tenant)))

    @routes.get(
        "/v1/requests/{request_id}/events",
        openapi_extra=_EVENTS_PARAMETERS,
        summary="A request's events from an offset",
    )
    async def events(request: Request, request_id: str) -> Response:
        tenant = gateway.tenant(request.headers.get("authorization"))
        position = _position(request, request_id)
        view, is_complete = await gateway.requests.resume(
            request_id, tenant, from_index=position.next_index, digest=position.digest
        )
        with_opening = request.headers.get("last-event-id") is None and position.next_index == 0
        call = gateway.calls.begin("resume", RESUME, request.headers)
        call.resumed(view.spec)
        reading = Reading(
            view.spec,
            tenant,
            call,
            writer_of(view.spec),
            start=position,
            with_opening=with_opening,
            is_complete=is_complete,
        )
        return EventStream(gateway, reading)

    return routes


def writer_of(spec: RequestSpec) -> AnswerWriter:
    """Return what writes a request's answer in the form that it was asked for in; gRPC's is read as a completion."""
    return ChatWriter(spec) if spec.answer.api == API_FORM_CHAT_COMPLETIONS else CompletionWriter(spec)


def _position(request: Request, request_id: str) -> Position:
    """Return where to read on. Last-Event-ID wins: a reconnecting EventSource adds it to the URL it began with."""
    last_event_id = request.headers.get("last-event-id")
    if last_event_id is not None:
        return Position.parse(last_event_id, request_id)
    text = request.query_params.get("from")
    return Position() if text is None else Position.parse_index(text)


def _view_body(view: RequestView) -> dict[str, Any]:
    return {
        "id": view.request_id,
        "model": view.model,
        "state": RequestState.Name(view.state).removeprefix("REQUEST_STATE_").lower(),
        "queue_position": view.queue_position,
        "finish_reason": finish_reason_body(view.finish_reason),
        "next_index": view.next_index,
        "usage": usage_body(view.usage),
        "attempts": view.attempts,
    }
