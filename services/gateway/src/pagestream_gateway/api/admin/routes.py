"""All routes of /admin/v1."""

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from pagestream_gateway.api.admin.deployment import _add_deployment_routes
from pagestream_gateway.api.admin.quarantine import _add_quarantine_routes
from pagestream_gateway.api.admin.requests import _add_request_routes
from pagestream_gateway.api.admin.usage import _add_usage_routes
from pagestream_gateway.api.admin.routing import admin_router
from pagestream_gateway.core.gateway import Gateway


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
