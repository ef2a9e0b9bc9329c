"""Which names of this server a request may carry in its Host header.

A web page whose name an attacker lets resolve to 127.0.0.1 (DNS rebinding) reads a server there as its own origin, so
that CORS doesn't keep it out. The page's name stays in the Host header.
"""

from collections.abc import Sequence

from fastapi import FastAPI
from pagestream_telemetry import is_loopback
from starlette.types import ASGIApp, Receive, Scope, Send

from pagestream_gateway.api.openai.errors import error_response
from pagestream_gateway.errors import HostNotAllowed
from pagestream_gateway.settings import GatewaySettings

_ANY = "*"


def limit_hosts(app: FastAPI, settings: GatewaySettings, address: str, *, asks_for_credentials: bool) -> None:
    """Refuse other hosts than this machine's where the address is loopback and no credential is asked for."""
    if not asks_for_credentials and is_loopback(address) and _ANY not in settings.hosts:
        app.add_middleware(LimitedHosts, more=[address, *settings.hosts])


class LimitedHosts:
    """ASGI middleware: 403 where the Host header is neither a name of this machine's own nor one of `more`."""

    def __init__(self, app: ASGIApp, more: Sequence[str]) -> None:
        self._app = app
        self._more = {each.lower() for each in more}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not self._is_allowed(host := _without_port(value.decode("latin-1"))):
                    await error_response(HostNotAllowed(host))(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        return host in self._more or is_loopback(host)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    has_port = bool(colon) and (not port or port.isdecimal()) and (":" not in name or name.endswith("]"))
    return (name if has_port else host).lower().removesuffix(".")
