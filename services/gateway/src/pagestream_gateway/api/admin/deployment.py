"""/admin/v1/engines, /models and /queues: what runs and what waits."""

from typing import Any

from fastapi import APIRouter
from pagestream_streams.admin.observation import QueueDepth, QueueState, queue_states, read_engine_loads, tenant_queues
from pagestream_streams.admin.roster import RosterRow
from starlette.responses import JSONResponse, Response

from pagestream_gateway.core.gateway import Gateway


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
