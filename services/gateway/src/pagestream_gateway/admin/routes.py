"""/admin/v1: engines, models, queues, quarantined requests, requests of any tenant, and what tenants have used.

Every call needs an administrator's key, and is audited with its outcome.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pagestream_streams import QuarantinedRequest
from pagestream_streams.admin.broker import tenant_of
from pagestream_streams.admin.engine_models import EngineRow
from pagestream_streams.admin.observation import QueueDepth, QueueState, queue_states, read_engine_loads, tenant_queues
from pagestream_streams.errors import RequestNotFound
from pagestream_streams.limits import read_usage
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.auth.identity import is_tenant
from pagestream_gateway.calls import DISCONNECTED, OK
from pagestream_gateway.error_codes import error_report
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.callers import credentials_of
from pagestream_gateway.http.documents import ADMIN_PREFIX, Answers, AnswersByPath
from pagestream_gateway.streams.requests import (
    LIST_PARAMETERS,
    RequestAnswer,
    RequestList,
    listed_limit,
    summary_body,
    view_body,
)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def admin_router(gateway: Gateway) -> APIRouter:
    """Return a router without routes. Its handlers run only for administrators."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                administrator = await gateway.identify_administrator(credentials_of(request))
                code = DISCONNECTED
                try:
                    answer = await handle(request)
                    code = OK
                    return answer
                except Exception as error:
                    code = error_report(error).code
                    raise
                finally:
                    gateway.audit.administered(administrator, request.method, request.scope["path"], code)

            return guarded

    return APIRouter(prefix=ADMIN_PREFIX, tags=["administration"], route_class=Guarded)


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
        rows = (await gateway.limit.wait(gateway.broker.engine_models.read())).engines
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


def _roster_row(engine_id: str, row: EngineRow) -> dict[str, Any]:
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


class AdminEngine(BaseModel):
    """An engine's load at its last heartbeat; null where it has not said it yet."""

    id: str
    model: str
    running: int | None = Field(description="Sequences that hold KV blocks.")
    waiting: int | None = Field(description="Sequences that wait inside the engine.")
    kv_utilization: float | None = Field(description="Referenced blocks by all blocks.")
    max_model_len: int | None = Field(description="Longest context in tokens; 0 for any.")


class AdminEngines(BaseModel):
    """The living engines by model."""

    object: Literal["list"]
    data: list[AdminEngine]


class AdminRosterRow(BaseModel):
    """An engine that changes its model."""

    id: str
    models: list[str] = Field(description="What it may load.")
    serving: str
    is_loading: bool
    last: str = Field(description="What it had before it was put to sleep.")
    active: int = Field(description="Requests that it runs.")
    failed: dict[str, str] = Field(description="Models that it can't load, with the reasons.")
    postponed: list[str] = Field(description="Models that it tries to load again later.")


class AdminModel(BaseModel):
    """A model."""

    name: str
    created: int
    engines: int = Field(description="Engines that live now.")
    max_model_len: int


class AdminModels(BaseModel):
    """The models by name, and the engines that change theirs."""

    object: Literal["list"]
    data: list[AdminModel]
    roster: list[AdminRosterRow]


class AdminQueue(BaseModel):
    """What waits in one queue of a model, over all partitions."""

    model: str
    queue: str = Field(description='A priority class, "resume" (begun requests) or "suspect".')
    requests: int
    tokens: int
    oldest_s: float
    drain_rate: float = Field(description="Prompt tokens a second that engines claim from it.")


class AdminTenantQueue(BaseModel):
    """What waits of one tenant's requests that have not begun."""

    model: str
    queue: str
    tenant: str
    requests: int
    tokens: int


class AdminQueues(BaseModel):
    """All queues, and what of their classes is each tenant's."""

    object: Literal["list"]
    data: list[AdminQueue]
    tenants: list[AdminTenantQueue]


class AdminRequest(RequestAnswer):
    """Where a request stands, and whose it is."""

    tenant: str


class AdminUsageRow(BaseModel):
    """What one credential has used of one model in an hour or a day."""

    start_s: int = Field(description="Unix seconds of its begin.")
    span_s: int = Field(description="3600 or 86400.")
    tenant: str
    credential: str
    model: str
    requests: int = Field(description="That ended in this time.")
    prompt_tokens: int
    cached_tokens: int = Field(description="Of the prompt tokens, those found in a prefix cache.")
    output_tokens: int


class AdminUsage(BaseModel):
    """What tenants have used."""

    object: Literal["list"]
    data: list[AdminUsageRow]


class AdminQuarantined(BaseModel):
    """A request of which engines died."""

    id: str
    model: str
    tenant: str
    reason: str
    next_index: int = Field(description="Entries in its log when the engines died.")
    attempts: int
    engines: list[str]
    quarantined_at: float = Field(description="Unix seconds, by Redis' clock.")
    requeued_as: str | None = Field(description="The id under which it goes on.")


class AdminQuarantine(BaseModel):
    """The quarantined requests, oldest first."""

    object: Literal["list"]
    data: list[AdminQuarantined]
    has_more: bool


class AdminRelease(BaseModel):
    """The request under which a quarantined one goes on."""

    id: str


class AdminReload(BaseModel):
    """Something that was read again."""

    name: str
    changed: bool = Field(description="False also for what can't be used; the gateway's log says why.")


class AdminReloads(BaseModel):
    """What this gateway has read again."""

    object: Literal["list"]
    data: list[AdminReload]


ANSWERS: AnswersByPath = {
    ("get", f"{ADMIN_PREFIX}/engines"): Answers(AdminEngines, errors=(401,)),
    ("get", f"{ADMIN_PREFIX}/models"): Answers(AdminModels, errors=(401,)),
    ("get", f"{ADMIN_PREFIX}/queues"): Answers(AdminQueues, errors=(401,)),
    ("get", f"{ADMIN_PREFIX}/usage"): Answers(AdminUsage, errors=(401,)),
    ("get", f"{ADMIN_PREFIX}/tenants/{{tenant}}/requests"): Answers(RequestList, errors=(401,)),
    ("get", f"{ADMIN_PREFIX}/requests/{{request_id}}"): Answers(AdminRequest, errors=(401, 404)),
    ("delete", f"{ADMIN_PREFIX}/requests/{{request_id}}"): Answers(AdminRequest, errors=(401, 404)),
    ("get", f"{ADMIN_PREFIX}/quarantine"): Answers(AdminQuarantine, errors=(401, 404)),
    ("post", f"{ADMIN_PREFIX}/quarantine/{{request_id}}/release"): Answers(AdminRelease, errors=(401, 404)),
    ("post", f"{ADMIN_PREFIX}/keys/reload"): Answers(AdminReloads, errors=(401,)),
}
"""By method and path."""


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
