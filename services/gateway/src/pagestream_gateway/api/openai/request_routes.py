"""/v1/requests/<id>: where a request stands, its events from any offset, and its end."""

from typing import Any

from fastapi import APIRouter
from pagestream.v1.inference_pb2 import RequestState
from pagestream_streams import RequestView
from pagestream_streams.protocol.finish_reasons import finish_reason_name
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.api.openai.answers import EventStream, Reading
from pagestream_gateway.api.openai.bodies import usage_body
from pagestream_gateway.api.openai.caller import Door
from pagestream_gateway.api.openai.documents import EVENTS_PARAMETERS
from pagestream_gateway.api.openai.position import Position
from pagestream_gateway.core.calls import RESUME
from pagestream_gateway.core.frontend import Frontend


def request_router(frontend: Frontend, door: Door) -> APIRouter:
    """The routes of accepted requests. Another tenant's request is one that does not exist."""
    router = APIRouter(tags=["requests"])

    @router.get("/v1/requests/{request_id}", summary="Where a request stands")
    async def get_request(request: Request, request_id: str) -> Response:
        tenant = door.enter(request)
        return JSONResponse(_view_body(await frontend.view(request_id, tenant)))

    @router.delete("/v1/requests/{request_id}", summary="End a request")
    async def cancel_request(request: Request, request_id: str) -> Response:
        tenant = door.enter(request)
        await frontend.cancel(request_id, tenant)
        return JSONResponse(_view_body(await frontend.view(request_id, tenant)))

    @router.get(
        "/v1/requests/{request_id}/events", openapi_extra=EVENTS_PARAMETERS, summary="A request's events from an offset"
    )
    async def events(request: Request, request_id: str) -> Response:
        tenant = door.enter(request)
        position = _position(request, request_id)
        view, is_complete = await frontend.reenter(
            request_id, tenant, from_index=position.next_index, digest=position.digest
        )
        with_opening = request.headers.get("last-event-id") is None and position.next_index == 0
        call = frontend.calls.begin("resume", RESUME, request.headers)
        call.resumed(view.spec)
        reading = Reading(view.spec, tenant, call, position, with_opening=with_opening, is_complete=is_complete)
        return EventStream(frontend, reading)

    return router


def _position(request: Request, request_id: str) -> Position:
    """A reconnecting EventSource repeats its URL and adds Last-Event-ID, so that one wins."""
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
        "finish_reason": finish_reason_name(view.finish_reason) if view.finish_reason else None,
        "next_index": view.next_index,
        "usage": usage_body(view.usage),
        "attempts": view.attempts,
    }
