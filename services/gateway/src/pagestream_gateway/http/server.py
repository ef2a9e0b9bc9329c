"""uvicorn inside a process that handles signals and runs the event loop itself."""

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from pagestream_telemetry import join_address, listening_sockets
from starlette.types import ASGIApp

from pagestream_gateway.errors import StartupError
from pagestream_gateway.http.protocol import WRITE_BUFFER_BYTES, BoundedHttpProtocol, ConnectionLimits

_BACKLOG = 4096  # thousands of streams may reconnect at once when another gateway has gone
# Seconds until the kernel probes a silent connection, and between probes, and how many may be lost. Address translation
# and balancers of connections forget one that is silent for 4 to 6 minutes, as that of an answer without a stream is.
_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6}


class _Server(uvicorn.Server):
    """Leaves signals to the process, bounds its connections, and sets `serving` once it accepts them."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()
        self._limits = limits
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections from the sockets. In place of uvicorn's, which knows no limit on TLS handshakes."""
        loop = asyncio.get_running_loop()
        handshake_s = self._limits.settings.header_timeout_s if self._tls else None
        self.servers = [
            await loop.create_server(
                self._connection,
                sock=listener,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
                backlog=self.config.backlog,
            )
            for listener in sockets or []
        ]
        self.started = True
        self.serving.set()

    def _connection(self) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(self._limits, self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A server with its port. Call `start`, then `stop`."""

    def __init__(
        self, app: ASGIApp, limits: ConnectionLimits, *, close_limit_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """`close_limit_s`: seconds that open connections get when the server stops."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # anybody can send them: addresses are those of connections
            lifespan="off",
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=math.ceil(limits.settings.idle_timeout_s),
            timeout_graceful_shutdown=round(close_limit_s),
        )
        config.load()
        self._server = _Server(config, limits, tls)
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Serve; return the port that is bound. Raises StartupError where it can't be bound."""
        try:
            listeners = listening_sockets(host, port, _prepare)
        except OSError as error:
            raise StartupError(f"cannot serve HTTP on {join_address(host, port)}: {error.strerror or error}") from error
        bound: int = listeners[0].getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(listeners), name=f"HTTP server {bound}")
        serving = asyncio.create_task(self._server.serving.wait())
        try:
            await asyncio.wait({self._task, serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if not self._server.started:
            for listener in listeners:
                listener.close()
            self._task.result()
            raise StartupError(f"cannot serve HTTP on {join_address(host, port)}: the server has ended")
        return bound

    async def stop(self) -> None:
        """Stop listening, let open answers end within the limit, close connections."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def _prepare(listener: socket.socket) -> None:
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # its connections inherit it; else the kernel buffers megabytes
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit this, too
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
