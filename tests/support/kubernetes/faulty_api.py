"""An HTTP layer before a real API server, which answers some calls itself: 429, 500, or an error after the call has
taken effect.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from support.clients.gateway_clients import issue_certificate
from support.processes.stack import free_port
from support.processes.waiting import LIMIT_S
from yarl import URL

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}
_MOST_BODY_BYTES = 4 << 20


@dataclass(frozen=True)
class ErrorAnswers:
    """Answers in place of the API server's."""

    status: int
    share: float = 1.0
    """The part of all calls that gets one."""
    retry_after_s: int | None = None
    takes_effect: bool = False
    """Whether the call reaches the API server all the same, and only its answer is lost."""


class FaultyApi:
    """Carries HTTP to the API server at `upstream`. Set `errors` from any thread; None carries all calls."""

    def __init__(self, upstream: str, *, seed: int) -> None:
        self.port = free_port()
        self.errors: ErrorAnswers | None = None
        self.answered: Counter[int] = Counter()
        """Calls that got an error of this layer, by its status."""
        self._upstream, self._random = upstream, random.Random(seed)
        self._session: aiohttp.ClientSession

    async def serve(self, tls: ssl.SSLContext, ready: threading.Event, stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        timeout = aiohttp.ClientTimeout(total=None, connect=10.0)
        connector = aiohttp.TCPConnector(ssl=False, limit=0)
        application = web.Application(client_max_size=_MOST_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._session:
            # A watch whose client has gone must not wait for its next event.
            runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=tls).start()
                ready.set()
                await stop.wait()
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        errors = self.errors
        try:
            if errors is None or self._random.random() >= errors.share:
                return await self._carry(request)
            if errors.takes_effect and request.method != "GET":  # which has no effect, and of a watch no end
                async with self._call(request) as answer:
                    await answer.read()
            self.answered[errors.status] += 1
            return _error(errors)
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()  # what a client sees when the API server dies
            return web.Response(status=HTTPStatus.BAD_GATEWAY)

    def _call(self, request: web.Request) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        url = URL(f"{self._upstream}{request.raw_path}", encoded=True)
        data = request.content if request.can_read_body else None
        return self._session.request(
            request.method, url, headers=_end_to_end(request.headers), data=data, allow_redirects=False
        )

    async def _carry(self, request: web.Request) -> web.StreamResponse:
        async with self._call(request) as answer:
            carried = web.StreamResponse(status=answer.status, headers=_end_to_end(answer.headers))
            await carried.prepare(request)
            async for chunk in answer.content.iter_any():
                await carried.write(chunk)
            await carried.write_eof()
            return carried


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP)


def _error(errors: ErrorAnswers) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "a fault", "code": errors.status}
    headers = {} if errors.retry_after_s is None else {"Retry-After": str(errors.retry_after_s)}
    return web.json_response(status, status=errors.status, headers=headers)


@contextmanager
def faulty_api(upstream: str, folder: Path, *, seed: int) -> Iterator[FaultyApi]:
    """Serve for the length of a block, in a thread of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = issue_certificate(folder, 1)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    api, ready = FaultyApi(upstream, seed=seed), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        try:
            loop.run_until_complete(api.serve(tls, ready, stop))
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="faulty API server")
    thread.start()
    try:
        if not ready.wait(LIMIT_S):
            raise TimeoutError("the layer before the API server does not serve")
        yield api
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(LIMIT_S)
