"""The port for probes and scrapers: /healthz, /readyz and /metrics.

It is served by threads, so that a liveness probe gets an answer while the event loop hangs, which it has to detect.
"""

from __future__ import annotations

import http.server
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

from pagestream_telemetry.addresses import is_loopback, join_address, listening_sockets
from pagestream_telemetry.errors import EndpointError

logger = logging.getLogger(__name__)

PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TEXT_TYPE = "text/plain; charset=utf-8"
_STOP_LIMIT_S = 2.0
_CLIENT_TIMEOUT_S = 10.0  # a client that sends nothing for so long is disconnected
_MAX_PROFILE_STEPS = 10_000


@dataclass(frozen=True)
class Probes:
    """The functions that give the answers. All are called on the endpoint's threads."""

    health: Callable[[], str]
    """Returns why the process should be restarted; "" if it should not."""
    readiness: Callable[[], str]
    """Returns why the process takes no work; "" when it is ready."""
    metrics: Callable[[], bytes]
    """Returns all metrics in Prometheus' text format."""
    profile: Callable[[int], str] | None = None
    """Starts a profile of so many steps and returns its path. Raises RuntimeError where one is running. None: this
    process has no profiles.
    """
    report: Callable[[], str] | None = None
    """Returns lines that /healthz shows below its answer."""


class Endpoint:
    """Used as `with Endpoint(probes, host, port) as endpoint`; `endpoint.port` is the port that is bound.

    The host `::` is every address of this machine, IPv4 and IPv6.

    `POST /debug/profile?steps=N` starts a profile; only requests from this machine may.

    Raises:
        EndpointError: the port is taken, or the address is not of this machine.
    """

    def __init__(self, probes: Probes, host: str, port: int) -> None:
        """Bind the port; 0 takes a free one."""
        try:
            self._servers = _servers(listening_sockets(host, port), probes)
        except OSError as error:
            raise EndpointError(
                f"cannot serve metrics on {join_address(host, port)}: {error.strerror or error}"
            ) from error
        self._threads = [
            threading.Thread(target=each.serve_forever, name="metrics endpoint", daemon=True) for each in self._servers
        ]

    @property
    def port(self) -> int:
        """TCP port that is bound."""
        bound: int = self._servers[0].server_address[1]
        return bound

    def __enter__(self) -> Self:
        """Start to serve."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join(_STOP_LIMIT_S)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, bound: socket.socket, probes: Probes) -> None:
        """Serve on a socket that is bound. Raises OSError where it can't listen."""
        self.probes, self.address_family = probes, bound.family
        # The base class would bind a socket of its own, of one family, and look up the host's name.
        super().__init__(bound.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.server_activate()


def _servers(sockets: Sequence[socket.socket], probes: Probes) -> list[_Server]:
    try:
        return [_Server(each, probes) for each in sockets]
    except OSError:
        for each in sockets:
            each.close()
        raise


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _CLIENT_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        """Answer a probe or a scraper."""
        path, probes = urlsplit(self.path).path, self.server.probes
        if not self._is_own_name():
            self._send_text(403, "given a name that is not this machine's, expected localhost or a loopback address")
        elif path == "/metrics":
            self._send(200, probes.metrics(), PROMETHEUS_TYPE)
        elif path == "/healthz":
            report = probes.report() if probes.report is not None else ""
            self._send_status(probes.health(), "ok", report)
        elif path == "/readyz":
            self._send_status(probes.readiness(), "ready")
        else:
            self._send_text(404, f"{path}: not found; there are /healthz, /readyz and /metrics")

    def do_POST(self) -> None:
        """Start a profile."""
        url, profile = urlsplit(self.path), self.server.probes.profile
        self.close_connection = True  # a body, if any, is not read
        if url.path != "/debug/profile" or profile is None:
            self._send_text(404, f"{url.path}: not found, or turned off")
        elif not is_loopback(self.client_address[0]):
            self._send_text(403, "profiles can be started from this machine alone")
        elif "Origin" in self.headers or not self._is_own_name():
            self._send_text(403, "profiles can't be started by web pages")
        else:
            self._profile(profile, parse_qs(url.query).get("steps", ["10"])[-1])

    def _is_own_name(self) -> bool:
        """Whether the Host header is a name of this machine, where only this machine reaches the port.

        A web page whose name resolves to 127.0.0.1 (DNS rebinding) keeps its name there.
        """
        if not is_loopback(str(self.server.server_address[0])) or "Host" not in self.headers:
            return True
        try:
            return is_loopback(urlsplit(f"//{self.headers['Host']}").hostname or "")
        except ValueError:
            return False

    def _profile(self, profile: Callable[[int], str], steps: str) -> None:
        if not steps.isdecimal() or not 1 <= int(steps) <= _MAX_PROFILE_STEPS:
            self._send_text(
                400, f"steps: {steps[:40]!r} was given, a whole number from 1 to {_MAX_PROFILE_STEPS} is expected"
            )
            return
        try:
            self._send_text(202, profile(int(steps)))
        except RuntimeError as error:
            self._send_text(409, str(error))

    def _send_status(self, problem: str, good: str, report: str = "") -> None:
        self._send_text(503 if problem else 200, "\n".join(filter(None, [problem or good, report])))

    def _send_text(self, status: int, text: str) -> None:
        self._send(status, f"{text}\n".encode(), _TEXT_TYPE)

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
        """Log at DEBUG: probes come every few seconds."""
        logger.debug(format, *args)
