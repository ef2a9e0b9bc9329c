"""/healthz, /readyz, /metrics: for whoever runs the process; no key is asked for."""

from fastapi import APIRouter
from pagestream_telemetry.endpoint import PROMETHEUS_TYPE
from starlette.responses import PlainTextResponse, Response

from pagestream_gateway.core.frontend import Frontend


def health_router(frontend: Frontend) -> APIRouter:
    """The routes that probes and scrapers read."""
    router = APIRouter(tags=["operation"])

    @router.get("/healthz", summary="Whether the process works")
    async def healthz() -> Response:
        return PlainTextResponse("ok\n")

    @router.get("/readyz", summary="Whether Redis answers and a model is known")
    async def readyz() -> Response:
        if await frontend.is_ready():
            return PlainTextResponse("ready\n")
        return PlainTextResponse(
            "not ready: Redis does not answer, no model is known, or the process is stopping\n", 503
        )

    @router.get("/metrics", summary="Metrics in Prometheus' text form")
    async def metrics() -> Response:
        return Response(await frontend.exposition(), media_type=PROMETHEUS_TYPE)

    return router
