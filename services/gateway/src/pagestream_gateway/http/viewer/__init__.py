"""The page at /docs: a kept copy of Swagger UI that shows /openapi.json and fetches nothing from outside."""

import gzip
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PAGE, _OPEN_PAGE = "index.html", "open.html"
_ASKS = b'data-asks-for-keys="true"'
_FILES = ("docs.css", "docs.js", "swagger-ui.css", "swagger-ui-bundle.js")
_LEVEL = 6  # of gzip: 1.9 MB become 0.5 MB in 0.1 s
# Swagger UI has icons as data: addresses. It sets styles by script, which needs no permission.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


class _File(NamedTuple):
    plain: bytes
    compressed: bytes


def router(*, asks_for_credentials: bool) -> APIRouter:
    """Return the routes of the page and its files. The page calls nothing by itself where credentials are asked for."""
    routes = APIRouter(include_in_schema=False)
    routes.add_api_route("/docs", _endpoint(_PAGE if asks_for_credentials else _OPEN_PAGE), methods=["GET"])
    for name in _FILES:
        routes.add_api_route(f"/docs/{name}", _endpoint(name), methods=["GET"])
    return routes


def _endpoint(name: str) -> Callable[[Request], Response]:
    kind = _KINDS[name.rpartition(".")[2]]
    is_page = name in (_PAGE, _OPEN_PAGE)

    def part(request: Request) -> Response:  # beside the event loop, since the first reader waits for gzip
        if is_page and request.scope.get("raw_path", b"").endswith(b"/"):  # the page's links are relative to /docs
            return RedirectResponse("../docs")
        file = _read(name)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.compressed, media_type=kind, headers={**_HEADERS, "Content-Encoding": "gzip"})
        return Response(file.plain, media_type=kind, headers=_HEADERS)

    return part


@cache
def _read(name: str) -> _File:
    plain = resources.files(__name__).joinpath(_PAGE if name == _OPEN_PAGE else name).read_bytes()
    if name == _OPEN_PAGE:
        plain = plain.replace(_ASKS, _ASKS.replace(b"true", b"false"))
    return _File(plain, gzip.compress(plain, _LEVEL, mtime=0))
