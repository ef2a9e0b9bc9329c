"""/admin/v1/quarantine: requests of which engines died, as `pagestream dead` shows and requeues them."""

from typing import Any

from fastapi import APIRouter
from pagestream_streams import QuarantinedRequest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.core.gateway import Gateway

_MAX_LISTED = 1000
_QUARANTINE_PARAMETERS: dict[str, Any] = {
    "parameters": [
        {
            "name": "model",
            "in": "query",
            "schema": {"type": "string"},
            "description": "Those of one model; else of all.",
        }
    ]
}


def _add_quarantine_routes(routes: APIRouter, gateway: Gateway) -> None:
    """Add the routes."""

    @routes.get("/quarantine", openapi_extra=_QUARANTINE_PARAMETERS, summary="The quarantined requests, oldest first")
    async def list_quarantined(request: Request) -> Response:
        asked = request.query_params.get("model")
        names = [asked] if asked else [info.name for info, _ in await gateway.models.list_models()]
        found: list[QuarantinedRequest] = []
        for name in names:
            found += await gateway.limit.wait(gateway.broker.quarantined(name))
        found.sort(key=lambda each: (each.quarantined_at, each.request_id))
        rows = [_row(each) for each in found[:_MAX_LISTED]]
        return JSONResponse({"object": "list", "data": rows, "has_more": len(found) > _MAX_LISTED})

    @routes.post("/quarantine/{request_id}/release", summary="Requeue a quarantined request under a new id")
    async def release(request_id: str) -> Response:
        return JSONResponse({"id": await gateway.limit.wait(gateway.broker.requeue(request_id))})


def _row(request: QuarantinedRequest) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "model": request.model,
        "tenant": request.tenant,
        "reason": request.reason,
        "next_index": request.next_index,
        "attempts": request.attempts,
        "engines": list(request.engines),
        "quarantined_at": request.quarantined_at,
        "requeued_as": request.requeued_as,
    }
