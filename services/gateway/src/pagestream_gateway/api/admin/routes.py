"""All routes of /admin/v1."""

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from pagestream_gateway.api.admin import deployment, quarantine, requests, usage
from pagestream_gateway.api.admin.routing import admin_router
from pagestream_gateway.core.gateway import Gateway


def router(gateway: Gateway) -> APIRouter:
    """Return the routes."""
    routes = admin_router(gateway)
    for resource in (deployment, requests, quarantine, usage):
        resource.add_routes(routes, gateway)

    @routes.post(
        "/keys/reload", summary="Read keys, limits, issuers' keys and rules for certificates again, here alone"
    )
    async def reload() -> Response:
        rows = [{"name": each.name, "changed": await each.run()} for each in gateway.reloads]
        return JSONResponse({"object": "list", "data": rows})

    return routes
