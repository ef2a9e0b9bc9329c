"""/admin/v1/usage: what tenants have used."""

from typing import Any

from fastapi import APIRouter
from pagestream_streams.limits import read_usage
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.core.identities.identity import is_tenant
from pagestream_gateway.errors import InvalidRequest

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

    @routes.get("/usage", openapi_extra=_USAGE_PARAMETERS, summary="What tenants have used, by credential, model and time")
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
