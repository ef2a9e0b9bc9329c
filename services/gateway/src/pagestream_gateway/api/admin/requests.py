"""/admin/v1/requests and /admin/v1/tenants: requests of any tenant, without what they say."""

from fastapi import APIRouter
from pagestream_streams.admin.broker import tenant_of
from pagestream_streams.errors import RequestNotFound
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.api.openai.requests import LIST_PARAMETERS, listed_limit, summary_body, view_body
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.core.identities.identity import is_tenant
from pagestream_gateway.errors import InvalidRequest


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
