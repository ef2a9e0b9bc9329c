"""uvicorn inside a process that handles signals itself, with limits on what a client sends and how long it takes."""

import asyncio
import contextlib
import math
import socket
import ssl
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import httptools
import uvicorn
from pagestream_telemetry import join_address, listening_sockets
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pagestream_gateway.error_codes import error_report
from pagestream_gateway.errors import (
    BodyTooLarge,
    GatewayError,
    HeaderTooLarge,
    MalformedHttp,
    OriginNotAllowed,
    RequestTimeout,
    StartupError,
    TooManyConnections,
)
from pagestream_gateway.http.callers import CorsHeaders
from pagestream_gateway.openai.errors import error_response
from pagestream_gateway.settings import ConnectionSettings
from pagestream_gateway.streams.events import BODY_WRITER
from pagestream_gateway.streams.websocket import WebSocket, is_handshake

# Requests that a client sends ahead of the answers on one connection; each takes kilobytes from its header on.
_MAX_PIPELINED = 8
# A body in more chunks than this, of fewer bytes than that on average, costs more time than its bytes are worth: the
# parser calls back for each chunk.
_MAX_SMALL_CHUNKS = 1024
_SMALL_CHUNK_BYTES = 16
EXTEND_BODY_TIME = "pagestream.extend_body_time"
"""Name of the ASGI extension by which a route, once it knows who uploads, gives a body more time: it is called with
seconds from now on."""
WRITE_BUFFER_BYTES = 16 * 1024
"""Bytes of an answer that wait for a client before the answer waits itself, in the process and again in its kernel."""
# After a refusal the connection stays for so long, and drops so much, that a client which is still sending sees the
# answer: closing at once would reset the connection under it.
_LINGER_S = 2.0
_LINGER_BYTES = 1024 * 1024


@dataclass(frozen=True)
class ConnectionLimits:
    """What each connection of a server is held to, and whom a refusal is reported to."""

    settings: ConnectionSettings
    max_body_bytes: int
    """Bytes of a body that are still read once the request is answered."""
    max_connections: int
    """Open connections of the server."""
    on_refusal: Callable[[str], None]
    """Called with the error's code for each request or connection that is refused here."""
    cors: CorsHeaders
    """The headers with which a web page can read such a refusal, where its Origin has come before it."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which sets no limits, with those of ConnectionSettings.

    The parser joins the pieces of a header's value in quadratic time, so a header is refused by the bytes that came
    without completing anything, before they are many; and again, exactly, by name and value.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state=app_state)
        self._limits = limits
        self._in_body = False
        """Whether a request's header is complete, and its body is not."""
        self._is_repeating = False
        """Whether the parser is told again of a header that it has read."""
        self._is_refused = False
        self._unfinished_bytes = 0  # since the parser last completed a header, a part of a body, or a request
        self._header_bytes = 0
        self._body_bytes = 0
        self._body_timeout_s = limits.settings.body_timeout_s
        self._num_chunks = 0
        self._dropped_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._client_certificate: str | None = None
        self._num_begun = 0
        """Requests of which something has come."""
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the last that came, which may wait for its turn."""
        self._socket: WebSocket | None = None
        """What the connection carries after a handshake."""

    # -- what the transport calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request, or refuse the connection where there are too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._client_certificate = _client_certificate(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(TooManyConnections(self._limits.max_connections))
        else:
            self._start_timer(self._limits.settings.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and let the request that is being answered know: uvicorn tells the last one alone."""
        self._stop_timer()
        if self._socket is not None:
            self._socket.leave()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)
        # Each of these refers to this object: with clients that leave, thousands would wait for the garbage collector.
        self.pipeline.clear()
        self.cycle = self._answered = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse what came; the requests that it completes begin."""
        if self._socket is not None:
            self._socket.feed(data)
            return
        if self._is_refused:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._unfinished_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, GatewayError) else MalformedHttp())
            return
        if self._socket is None and self._unfinished_bytes > self._limits.settings.max_header_bytes:
            self._refuse(HeaderTooLarge(self._limits.settings.max_header_bytes))
        elif self._socket is None and self._unfinished_bytes:
            self._time_header()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        scope = cast(MutableMapping[str, Any], cycle.scope)
        if scope["method"] == "GET" and self._in_body and not self.pipeline and is_handshake(scope):
            self._socket = _socket_of(cycle, self._limits)
            self._stop_timer()
            app = _carried_by(self._socket, cycle, app)
        elif cycle.scope["http_version"] == "1.0":
            app = _without_chunks(cycle, app)
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """End an answer; the header that came in part meanwhile is waited for from now on."""
        super().on_response_complete()
        if self._unfinished_bytes and not self.transport.is_closing():
            self._time_header()

    # -- what the parser calls; an error that one of these raises ends the parsing

    def on_message_begin(self) -> None:
        """Begin a request. Raises MalformedHttp where too many wait for their answers."""
        if self._is_repeating:
            return
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise MalformedHttp
        super().on_message_begin()
        scope = cast(MutableMapping[str, Any], self.scope)
        self._num_begun += 1
        # Neither refers to connection or scope: those would refer to themselves and wait for the garbage collector.
        connection = weakref.ref(self)
        scope["extensions"] = {
            EXTEND_BODY_TIME: partial(_extend_body_time, connection, self._num_begun),
            BODY_WRITER: partial(_chunk_writer, connection),
        }
        if self._client_certificate is not None:
            scope["extensions"]["tls"] = {"client_cert_chain": [self._client_certificate]}
        self._header_bytes = self._body_bytes = self._num_chunks = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL. Raises HeaderTooLarge."""
        if self._is_repeating:
            return
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the header, or of a chunked body's trailer. Raises HeaderTooLarge."""
        if self._is_repeating:
            return
        self._count_header(len(name) + len(value))
        if len(self.headers) >= self._limits.settings.max_header_fields:
            raise HeaderTooLarge(self._limits.settings.max_header_bytes, self._limits.settings.max_header_fields)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer, and to wait for the body."""
        if self._is_repeating:
            return
        self._unfinished_bytes = 0
        self._in_body = True
        self._body_timeout_s = self._limits.settings.body_timeout_s
        self._start_timer(self._body_timeout_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body.

        Raises MalformedHttp for too many small chunks, BodyTooLarge for a long body that no one reads any more.
        """
        self._unfinished_bytes = 0
        self._num_chunks += 1
        self._body_bytes += len(body)
        if self._num_chunks > max(_MAX_SMALL_CHUNKS, self._body_bytes // _SMALL_CHUNK_BYTES):
            raise MalformedHttp
        if self.cycle.response_complete and self._body_bytes > self._limits.max_body_bytes:
            raise BodyTooLarge(self._limits.max_body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return  # the parser takes what follows for another protocol; it is the body
        self._unfinished_bytes = 0
        self._in_body = False
        self._stop_timer()
        super().on_message_complete()

    # -- requests to change the protocol

    def _parse(self, data: bytes) -> None:
        """Feed the parser; it stops after the header of a request that asks for another protocol."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                if self._socket is not None:
                    self._socket.feed(data[stopped.args[0] :])
                    return
                if not _asks_for_upgrade(self.parser):  # CONNECT: what follows is no HTTP; answer, then close
                    self.cycle.keep_alive = False
                    return
                head = _framing(self.parser, self.headers)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._is_repeating = True
                self.parser.feed_data(head)
                self._is_repeating = False
                data = data[stopped.args[0] :]
            else:
                return

    # -- limits

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > self._limits.settings.max_header_bytes:
            raise HeaderTooLarge(self._limits.settings.max_header_bytes)

    def _time_header(self) -> None:
        """Limit the time of a header that has begun, once no answer is being written: the next request may wait."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not (self._in_body or is_answering) and self._timer is None:
            self._start_timer(self._limits.settings.header_timeout_s)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._time_is_over)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_over(self) -> None:
        self._timer = None
        settings = self._limits.settings
        if self._in_body and self.pipeline:  # is not read before the answers ahead of it are written
            self._start_timer(settings.body_timeout_s)
        elif self._in_body:
            self._refuse(RequestTimeout(f"the request's body took longer than {self._body_timeout_s:g} s"))
        elif self._unfinished_bytes:
            self._refuse(RequestTimeout(f"the request's header took longer than {settings.header_timeout_s:g} s"))
        else:  # never asked for anything: an answer might be read as that of a later request
            self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Answer with an error where no other answer has begun, and close the connection."""
        self._is_refused = True
        self._stop_timer()
        self._limits.on_refusal(error_report(error).code)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not self._in_body or cycle.response_started or self.pipeline:
                self.transport.abort()
                return
            cycle.disconnected = True  # this answer takes the place of the application's
            cycle.message_event.set()
        self._answer(error)

    def _answer(self, error: GatewayError) -> None:
        origin = next((value.decode("latin-1") for name, value in self.headers or () if name == b"origin"), None)
        response = error_response(error, self._limits.cors.of(origin))
        head = b"".join(b"%b: %b\r\n" % (name, value) for name, value in response.raw_headers)
        status_line = STATUS_LINE[response.status_code]
        self.transport.write(b"".join((status_line, head, b"connection: close\r\n\r\n", bytes(response.body))))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)


class _ChunkWriter:
    """Writes chunks of an answer that has begun; see BodyWriter. It waits in no queue of ASGI's."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def is_ready(self) -> bool:
        """Whether a chunk may be written now."""
        cycle = self._cycle
        return not (cycle.response_complete or cycle.disconnected or self._flow.write_paused)

    def write(self, body: bytes) -> None:
        """Write a chunk."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def _chunk_writer(connection: weakref.ref[BoundedHttpProtocol]) -> _ChunkWriter | None:
    """Return what writes chunks of the answer that a connection has begun, called by that answer.

    None on a WebSocket, and for a client of HTTP/1.0, whose answers have none.
    """
    protocol = connection()
    cycle = None if protocol is None or protocol._socket is not None else protocol._answered
    if cycle is None or not (cycle.response_started and cycle.chunked_encoding):
        return None
    return _ChunkWriter(cycle)


def _client_certificate(transport: asyncio.Transport) -> str | None:
    """Return the PEM of the certificate that the handshake has checked, None where there is none."""
    tls = transport.get_extra_info("ssl_object")
    certificate = None if tls is None else tls.getpeercert(binary_form=True)
    return None if certificate is None else ssl.DER_cert_to_PEM_cert(certificate)


def _extend_body_time(connection: weakref.ref[BoundedHttpProtocol], number: int, seconds: float) -> None:
    """Give the body of a connection's request of this number so many seconds from now on, unless it is complete."""
    protocol = connection()
    if protocol is not None and protocol._in_body and number == protocol._num_begun and not protocol._is_refused:
        protocol._body_timeout_s = seconds
        protocol._start_timer(seconds)


def _asks_for_upgrade(parser: httptools.HttpRequestParser) -> bool:
    """Return whether the request has an Upgrade field, which a server may ignore (RFC 9110, section 7.8)."""
    return bool(parser.should_upgrade()) and parser.get_method() != b"CONNECT"


def _framing(parser: httptools.HttpRequestParser, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return a header that tells another parser how long the request's body is, and of no upgrade."""
    fields = (field for field in headers if field[0] in (b"content-length", b"transfer-encoding"))
    version = parser.get_http_version().encode()
    return b"POST / HTTP/%b\r\n%b\r\n" % (version, b"".join(b"%b: %b\r\n" % field for field in fields))


def _socket_of(cycle: RequestResponseCycle, limits: ConnectionLimits) -> WebSocket:
    """Return what a connection carries from a handshake on.

    Raises OriginNotAllowed: a page of any origin may ask for WebSocket, since browsers do not hold it to CORS.
    """
    headers = dict(cycle.scope["headers"])
    origin, host = (headers.get(name, b"").decode("latin-1") for name in (b"origin", b"host"))
    is_own = origin.partition("://")[2].lower() == host.lower()
    if origin and not is_own and not limits.cors.allows(origin):
        raise OriginNotAllowed(origin)
    return WebSocket(
        cast(MutableMapping[str, Any], cycle.scope),
        cycle.transport,
        cycle.flow,
        body_timeout_s=limits.settings.body_timeout_s,
        write_bytes=WRITE_BUFFER_BYTES,
    )


def _carried_by(socket: WebSocket, cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return an application whose calls and answers travel as messages."""
    cycle.keep_alive = False
    cycle.response_started = True

    async def answer(_scope: Scope, _receive: ASGIReceiveCallable, _send: ASGISendCallable) -> None:
        try:
            await socket.run(cast(ASGIApp, app))
        finally:
            cycle.response_complete = True

    return answer


def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return an application whose answers of unknown length end with the connection: HTTP/1.0 has no chunks."""

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        is_endless = False

        async def sent(message: ASGISendEvent) -> None:
            nonlocal is_endless
            if message["type"] == "http.response.start":
                is_endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_endless:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and is_endless:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return answer


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
