"""A port for probes and scrapers: /healthz, /readyz and /metrics, in threads of their own.

They answer whatever the event loop does: that it hangs is what a liveness probe is to find out.
"""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

from pagestream_telemetry.errors import EndpointError

logger = logging.getLogger(__name__)

PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TEXT_TYPE = "text/plain; charset=utf-8"
_STOP_LIMIT_S = 2.0
_CLIENT_LIMIT_S = 10.0  # a client that sends nothing for so long is cut off
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class Probes:
    """What an endpoint answers with. All are called on the endpoint's threads."""

    health: Callable[[], str]
    """Why the process should be restarted; "" where it works."""
    readiness: Callable[[], str]
    """Why it takes no work; "" where it does."""
    metrics: Callable[[], bytes]
    """The exposition in Prometheus' text form."""
    profile: Callable[[int], str] | None = None
    """Begins a profile of so many steps, and returns where it will be; None: there is none to be had. Raises
    RuntimeError where one is under way.
    """


class Endpoint:
    """Used as `with Endpoint(probes, host, port) as endpoint`; `endpoint.port` is the port that is bound.

    A profile can be asked for by `POST /debug/profile?steps=N`, from this machine alone.

    Raises:
        EndpointError: the port is taken.
    """

    def __init__(self, probes: Probes, host: str, port: int) -> None:
        """Binds. `port` 0 takes a free one."""
        try:
            self._server = _Server((host, port), probes)
        except OSError as error:
            raise EndpointError(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics endpoint", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port that is bound."""
        bound: int = self._server.server_address[1]
        return bound

    def __enter__(self) -> Self:
        """Serves."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_STOP_LIMIT_S)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], probes: Probes) -> None:
        self.probes = probes
        super().__init__(address, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _CLIENT_LIMIT_S
    server: _Server

    def do_GET(self) -> None:
        """Answers a probe or a scraper."""
        path, probes = urlsplit(self.path).path, self.server.probes
        if path == "/metrics":
            self._answer(200, probes.metrics(), PROMETHEUS_TYPE)
        elif path == "/healthz":
            self._tell(probes.health(), "ok")
        elif path == "/readyz":
            self._tell(probes.readiness(), "ready")
        else:
            self._say(404, f"{path}: no such page; there are /healthz, /readyz and /metrics")

    def do_POST(self) -> None:
        """Begins a profile."""
        url, profile = urlsplit(self.path), self.server.probes.profile
        self.close_connection = True  # a body, if any, is not read
        if url.path != "/debug/profile" or profile is None:
            self._say(404, f"{url.path}: no such page, or it is turned off")
        elif not ip_address(self.client_address[0]).is_loopback:
            self._say(403, "profiles are begun from this machine alone")
        else:
            self._profile(profile, parse_qs(url.query).get("steps", ["10"])[-1])

    def _profile(self, profile: Callable[[int], str], steps: str) -> None:
        if not steps.isdecimal() or not 1 <= int(steps) <= _MOST_STEPS:
            self._say(400, f"steps: {steps[:40]!r} was given, a whole number from 1 to {_MOST_STEPS} is expected")
            return
        try:
            self._say(202, profile(int(steps)))
        except RuntimeError as error:
            self._say(409, str(error))

    def _tell(self, problem: str, good: str) -> None:
        self._say(503 if problem else 200, problem or good)

    def _say(self, status: int, text: str) -> None:
        self._answer(status, f"{text}\n".encode(), _TEXT_TYPE)

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
        """Probes come every few seconds: only for those who look closely."""
        logger.debug(format, *args)
