"""What `pagestream serve --demo` adds to the page at `/`: the control with which it kills processes and shows who has a
stream.

It listens on this machine's loopback address alone. A token that serve prints is exchanged for a session once; every
other call needs that session. Pages of other origins than the gateways' can't read an answer, and a name that resolves
here (DNS rebinding) is refused by its Host header.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from pagestream_streams import Broker, StreamsError, settings_from_environment
from pagestream_streams.admin.broker import read_owners
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagestream_cli.datadir import ServeRecord

_MOST_BYTES = 16 << 10
_MOST_IDS = 64
_LIMIT_S = 2.0
"""For one reading of Redis, which may be dead."""
_CLOSE_LIMIT_S = 2
_REFUSED = 401
_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Of this machine alone, where `serve --demo` listens."""


class Control:
    """The calls, and who may make them."""

    def __init__(self, record: Callable[[], ServeRecord], redis_url: str) -> None:
        """`record` returns what serve.json has now."""
        self._record = record
        self._redis_url = redis_url
        self._token: str | None = secrets.token_urlsafe(24)
        self._session = secrets.token_urlsafe(24)
        self._broker: Broker | None = None
        self._connecting = asyncio.Lock()

    @property
    def token(self) -> str:
        """What is exchanged for the session; empty once it was."""
        return self._token or ""

    def application(self, urls: Sequence[str]) -> Starlette:
        """Return the application; pages of the gateways at `urls` may call it, by whichever name they were opened."""
        routes = [
            Route("/session", self._begin, methods=["POST"]),
            Route("/processes", self._processes, methods=["GET"]),
            Route("/kill", self._kill, methods=["POST"]),
            Route("/owners", self._owners, methods=["POST"]),
        ]
        cors = Middleware(CORSMiddleware, allow_origins=_origins(urls), allow_headers=["*"], allow_methods=["*"])
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
        return Starlette(routes=routes, middleware=[hosts, cors])

    async def close(self) -> None:
        """Close the connection to Redis."""
        if self._broker is not None:
            await self._broker.close()

    async def _begin(self, request: Request) -> Response:
        given = (await _body(request)).get("token")
        token, self._token = self._token, None  # good once, also where it is wrong: it can't be tried
        if token is None or not isinstance(given, str) or not hmac.compare_digest(given.encode(), token.encode()):
            return JSONResponse({"error": "the token is not valid, or was used"}, _REFUSED)
        return JSONResponse({"session": self._session})

    async def _processes(self, request: Request) -> Response:
        if not self._knows(request):
            return _refusal()
        record = self._record()
        shown = [
            {"name": each.name, "pid": each.pid, "restarts": each.restarts}
            for each in record.processes
            if each.name != "serve"
        ]
        # The page's Content-Security-Policy can't name an IPv6 address.
        gateways = [url.replace("://[::1]:", "://localhost:") for url in record.http_urls()]
        return JSONResponse({"gateways": gateways, "model": record.model, "processes": shown})

    async def _kill(self, request: Request) -> Response:
        if not self._knows(request):
            return _refusal()
        part = (await _body(request)).get("part")
        processes = {each.name: each.pid for each in self._record().processes if each.name != "serve"}
        pid = processes.get(part) if isinstance(part, str) else None
        if pid is None:
            return JSONResponse({"error": "no such process runs now"}, 404)
        with contextlib.suppress(ProcessLookupError):  # it has just died by itself
            os.kill(pid, signal.SIGKILL)
        return JSONResponse({"pid": pid})

    async def _owners(self, request: Request) -> Response:
        if not self._knows(request):
            return _refusal()
        ids = (await _body(request)).get("ids")
        if not isinstance(ids, list) or len(ids) > _MOST_IDS or not all(isinstance(each, str) for each in ids):
            return JSONResponse({"error": f"ids: expected a list of at most {_MOST_IDS} request ids"}, 400)
        found = [""] * len(ids)
        with contextlib.suppress(StreamsError, TimeoutError):  # Redis may be away: nobody is known to have them
            async with asyncio.timeout(_LIMIT_S):
                found = await read_owners(await self._connected(), ids)
        return JSONResponse({"owners": [owner.rpartition("-")[0] for owner in found]})

    def _knows(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self._session.encode())

    async def _connected(self) -> Broker:
        async with self._connecting:
            if self._broker is None:
                self._broker = await Broker.connect(self._redis_url, settings_from_environment(os.environ))
            return self._broker


@contextlib.asynccontextmanager
async def running(control: Control, urls: Sequence[str]) -> AsyncIterator[int]:
    """Serve a control for gateways on a free port of the loopback address; yield the port.

    The address is of IPv4, since the page's Content-Security-Policy can't name one of IPv6.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    application = control.application(urls)
    settings = uvicorn.Config(application, log_level="critical", access_log=False, lifespan="off")
    settings.timeout_graceful_shutdown = _CLOSE_LIMIT_S
    server = _Server(settings)
    serving = asyncio.create_task(server.serve([listener]), name="control")
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
        await control.close()


def _origins(urls: Sequence[str]) -> list[str]:
    ports = {urlsplit(url).port for url in urls}
    return [*urls, *(f"http://{name}:{port}" for port in ports for name in _NAMES)]


class _Server(uvicorn.Server):
    """Leaves the signals to serve."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _body(request: Request) -> dict[str, Any]:
    """Return a small JSON object; {} for anything else."""
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > _MOST_BYTES:
            return {}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refusal() -> Response:
    return JSONResponse({"error": "a session is needed"}, _REFUSED)
