"""A router whose every call needs an administrator's key, and is audited with its outcome."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.calls import DISCONNECTED, OK
from pagestream_gateway.error_codes import error_report
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.callers import credentials_of

PREFIX = "/admin/v1"
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

    return APIRouter(prefix=PREFIX, tags=["administration"], route_class=Guarded)
