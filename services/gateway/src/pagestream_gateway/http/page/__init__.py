"""The page at `/`: a static bundle that talks to the HTTP API; it fetches nothing from outside."""

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.callers import identify

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_SCRIPTS = ("app", "api", "blocks", "chat", "colours", "control", "dom", "live", "streams", "timeline")
_FILES = ("style.css", *(f"{name}.js" for name in _SCRIPTS))
# Other gateways and the control of `pagestream serve --demo` are on other ports of this machine.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; connect-src 'self' http://127.0.0.1:* http://localhost:*"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def router(gateway: Gateway) -> APIRouter:
    """Return the routes of the page, its parts, and what it shows of engines."""
    routes = APIRouter(include_in_schema=False)
    routes.add_api_route("/", _endpoint("index.html"), methods=["GET"])
    for name in _FILES:
        routes.add_api_route(f"/page/{name}", _endpoint(name), methods=["GET"])

    @routes.get("/page/state")
    async def state(request: Request) -> Response:
        identity = await identify(gateway, request)
        view = await gateway.engines.view(identity.tenant)
        return Response(view, media_type="application/json", headers={"Cache-Control": "no-store"})

    return routes


def _endpoint(name: str) -> Callable[[], Awaitable[Response]]:
    content = resources.files("pagestream_gateway.http.page").joinpath(name).read_bytes()
    kind = _KINDS[name.rpartition(".")[2]]

    async def part() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return part
