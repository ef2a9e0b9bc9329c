"""/healthz, /readyz, /metrics and vLLM's names for such: for probes and scrapers, which send no API key.

Metrics name tenants and models, and tell what they use. So a port for callers who need a credential shows them to
administrators alone, and to others as little as /load does.
"""

from importlib.metadata import version

from fastapi import APIRouter
from pagestream_telemetry.endpoint import PROMETHEUS_TYPE
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.callers import credentials_of
from pagestream_gateway.http.documents import Answers, AnswersByPath

# A full Redis is no reason to take readers' gateways away: docs/design/redis.md.
_FEW = b"# The other metrics are on the metrics port, and here for administrators' keys.\n"
_FULL = "ready: Redis is at its memory limit; new requests are refused, accepted ones are served\n"


class VersionAnswer(BaseModel):
    """The version of the gateway."""

    version: str


class LoadAnswer(BaseModel):
    """What this process is doing."""

    server_load: int = Field(description="Answers that it is writing.")


_EMPTY = Answers()
_TEXT = Answers(texts=(200,))
ANSWERS: AnswersByPath = {
    ("get", "/healthz"): _TEXT,
    ("get", "/health"): _EMPTY,
    ("get", "/ping"): _EMPTY,
    ("get", "/version"): Answers(VersionAnswer),
    ("get", "/load"): Answers(LoadAnswer),
    ("get", "/readyz"): Answers(texts=(200, 503)),
    ("get", "/metrics"): _TEXT,
}
"""By method and path."""


def router(gateway: Gateway, *, is_for_callers: bool) -> APIRouter:
    """Return the routes of probes and scrapers, on a port for callers or on one of their own."""
    needs_administrator = is_for_callers and gateway.settings.gateway.asks_for_credentials
    routes = APIRouter(tags=["operation"])

    @routes.get("/healthz", summary="Whether the process works")
    async def healthz() -> Response:
        return PlainTextResponse("ok\n")

    @routes.get("/health", summary="As /healthz, under vLLM's name")
    @routes.get("/ping", summary="As /healthz, under SageMaker's name")
    async def health() -> Response:
        return Response(status_code=200)

    @routes.get("/version", summary="Version of the gateway")
    async def gateway_version() -> dict[str, str]:
        return {"version": version("pagestream-gateway")}

    @routes.get("/load", summary="Answers that this process is writing")
    async def load() -> dict[str, int]:
        return {"server_load": len(gateway.streams)}

    @routes.get("/readyz", summary="Whether Redis answers and a model is known")
    async def readyz() -> Response:
        if await gateway.is_ready():
            return PlainTextResponse(_FULL if await gateway.memory.is_full() else "ready\n")
        return PlainTextResponse(
            "not ready: Redis does not answer, no model is known, or the process is stopping\n", 503
        )

    @routes.get("/metrics", summary="Metrics in Prometheus' text form")
    async def metrics(request: Request) -> Response:
        if needs_administrator and gateway.authenticator.find_administrator(credentials_of(request)) is None:
            return Response(_FEW + gateway.public_exposition(), media_type=PROMETHEUS_TYPE)
        return Response(await gateway.exposition(), media_type=PROMETHEUS_TYPE)

    return routes
