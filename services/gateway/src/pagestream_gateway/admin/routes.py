"""/admin/v1: engines, models, queues, quarantined requests, requests of any tenant, and what tenants have used."""

from typing import Any

from fastapi import APIRouter
from pagestream_streams import QuarantinedRequest
from pagestream_streams.admin.broker import tenant_of
from pagestream_streams.admin.observation import QueueDepth, QueueState, queue_states, read_engine_loads, tenant_queues
from pagestream_streams.admin.roster import RosterRow
from pagestream_streams.errors import RequestNotFound
from pagestream_streams.limits import read_usage
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.admin.routing import admin_router
from pagestream_gateway.auth.identity import is_tenant
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.streams.requests import LIST_PARAMETERS, listed_limit, summary_body, view_body


def _add_deployment_routes(routes: APIRouter, gateway: Gateway) -> None:
    """Add the routes."""

    @routes.get("/engines", summary="The living engines and their load")
    async def engines() -> Response:
        names = [info.name for info, _ in await gateway.models.list_models()]
        loads = await gateway.limit.wait(read_engine_loads(gateway.broker, names))
        return _list(
            [
                {
                    "id": each.engine_id,
                    "model": model,
                    "running": each.running,
                    "waiting": each.waiting,
                    "kv_utilization": each.kv_utilization,
                    "max_model_len": each.max_model_len,
                }
                for model, living in loads.items()
                for each in living
            ]
        )

    @routes.get("/models", summary="The models, and the engines that change theirs")
    async def models() -> Response:
        rows = (await gateway.limit.wait(gateway.broker.roster.read())).engines
        return _list(
            [
                {
                    "name": info.name,
                    "created": info.created,
                    "engines": info.engines,
                    "max_model_len": card.max_model_len,
                }
                for info, card in await gateway.models.list_models()
            ],
            roster=[_roster_row(engine_id, row) for engine_id, row in rows.items()],
        )

    @routes.get("/queues", summary="What waits, by class and by tenant")
    async def queues() -> Response:
        states = await gateway.limit.wait(queue_states(gateway.broker))
        waiting = await gateway.limit.wait(tenant_queues(gateway.broker))
        return _list(
            [row for model, partitions in states.items() for row in _queue_rows(model, partitions)],
            tenants=[
                {
                    "model": each.model,
                    "queue": each.queue,
                    "tenant": each.tenant,
                    "requests": each.requests,
                    "tokens": each.tokens,
                }
                for each in waiting
            ],
        )


def _list(rows: list[dict[str, Any]], **more: Any) -> Response:
    return JSONResponse({"object": "list", "data": rows, **more})


def _roster_row(engine_id: str, row: RosterRow) -> dict[str, Any]:
    return {
        "id": engine_id,
        "models": list(row.models),
        "serving": row.serving,
        "is_loading": row.is_loading,
        "last": row.last,
        "active": row.active,
        "failed": dict(row.failed),
        "postponed": list(row.postponed),
    }


def _queue_rows(model: str, partitions: list[QueueState]) -> list[dict[str, Any]]:
    """Return a row for each queue with the sums over all partitions."""
    found: dict[str, list[QueueDepth]] = {}
    for state in partitions:
        for waiting in state.waiting:
            found.setdefault(waiting.queue, []).append(waiting)
    return [
        {
            "model": model,
            "queue": queue,
            "requests": sum(each.requests for each in parts),
            "tokens": sum(each.tokens for each in parts),
            "oldest_s": max(each.oldest_s for each in parts),
            "drain_rate": sum(each.drain_rate for each in parts),
        }
        for queue, parts in sorted(found.items())
    ]


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


def _add_request_routes(routes: APIRouter, gateway: Gateway) -> None:
    """Add the routes."""

    @routes.get(
        "/tenants/{tenant}/requests", openapi_extra=LIST_PARAMETERS, summary="A tenant's requests, newest first"
    )
    async def list_requests(request: Request, tenant: str) -> Response:
        if not is_tenant(tenant):
            raise InvalidRequest("tenant", "is not a tenant name")
        limit, after = listed_limit(request.query_params.get("limit")), request.query_params.get("after", "")
        try:
            page = await gateway.requests.list(tenant, limit=limit, after=after)
        except RequestNotFound as error:
            raise InvalidRequest("after", f"{after[:100]!r} is not in the list; begin with its first page") from error
        rows = [summary_body(each) for each in page.requests]
        return JSONResponse({"object": "list", "data": rows, "has_more": page.has_more})

    @routes.get("/requests/{request_id}", summary="Where a request of any tenant stands")
    async def view(request_id: str) -> Response:
        return await _view(gateway, request_id, await _tenant(gateway, request_id))

    @routes.delete("/requests/{request_id}", summary="End a request of any tenant")
    async def cancel(request_id: str) -> Response:
        tenant = await _tenant(gateway, request_id)
        await gateway.requests.cancel(request_id, tenant)
        return await _view(gateway, request_id, tenant)


async def _tenant(gateway: Gateway, request_id: str) -> str:
    return await gateway.limit.wait(tenant_of(gateway.broker, request_id))


async def _view(gateway: Gateway, request_id: str, tenant: str) -> Response:
    return JSONResponse({**view_body(await gateway.requests.view(request_id, tenant)), "tenant": tenant})


_DEFAULT_HOURS, _MAX_HOURS = 24, 24 * 400
_USAGE_PARAMETERS: dict[str, Any] = {
    "parameters": [
        {"name": "tenant", "in": "query", "schema": {"type": "string"}, "description": "One tenant's; else all."},
        {
            "name": "hours",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_HOURS, "default": _DEFAULT_HOURS},
            "description": "Of the hours that end within it, or of such days where hours are no longer kept.",
        },
    ]
}


def _add_usage_routes(routes: APIRouter, gateway: Gateway) -> None:
    """Add the route."""

    @routes.get(
        "/usage", openapi_extra=_USAGE_PARAMETERS, summary="What tenants have used, by credential, model and time"
    )
    async def usage(request: Request) -> Response:
        tenant = request.query_params.get("tenant")
        if tenant is not None and not is_tenant(tenant):
            raise InvalidRequest("tenant", "is not a tenant name")
        text = request.query_params.get("hours", str(_DEFAULT_HOURS))
        hours = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_HOURS)) else 0
        if not 1 <= hours <= _MAX_HOURS:
            raise InvalidRequest("hours", f"must be from 1 to {_MAX_HOURS}, got {text[:40]!r}")
        rows = await gateway.limit.wait(read_usage(gateway.broker, since_s=hours * 3600.0, tenant=tenant))
        return JSONResponse({"object": "list", "data": [row._asdict() for row in rows]})


def router(gateway: Gateway) -> APIRouter:
    """Return the routes."""
    routes = admin_router(gateway)
    _add_deployment_routes(routes, gateway)
    _add_request_routes(routes, gateway)
    _add_quarantine_routes(routes, gateway)
    _add_usage_routes(routes, gateway)

    @routes.post(
        "/keys/reload", summary="Read keys, limits, issuers' keys and rules for certificates again, here alone"
    )
    async def reload() -> Response:
        rows = [{"name": each.name, "changed": await each.run()} for each in gateway.reloads]
        return JSONResponse({"object": "list", "data": rows})

    return routes
