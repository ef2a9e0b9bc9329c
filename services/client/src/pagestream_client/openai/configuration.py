"""How the transport calls its gateways: their URLs, time limits, and whom TLS trusts."""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_client.openai.failures import CallRefused
from pagestream_client.openai.stream_state import HttpRequest, HttpStreamState
from pagestream_client.retry import Code, Configuration, Failure, Reconnection

try:
    import httpx2
except ImportError as error:
    raise ImportError(
        "pagestream_client.openai needs the package httpx2: install it with pip install 'pagestream-client[http]'"
    ) from error


@dataclass(frozen=True)
class HttpTransport:
    """Time limits of connections and calls, in seconds, and whom a TLS connection trusts."""

    connect_timeout_s: float = 5.0
    """Until a gateway that does not answer at all counts as failed."""
    read_timeout_s: float = 35.0
    """Longest silence of a stream. A gateway sends a sign of life every 15 s while a request waits, so one that is
    silent for longer may be dead."""
    ca_file: str | None = None
    """File of certificates (PEM) to trust beside the system's authorities; None: the HTTP library's."""


class HttpConfiguration(Configuration):
    """Gateways as base URLs, with what each call carries.

    Raises:
        ValueError: there is no URL, or one is not http(s)://host[:port].
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        reconnection: Reconnection | None,
        transport: HttpTransport | None,
    ) -> None:
        super().__init__([base_url(url) for url in ([urls] if isinstance(urls, str) else urls)], reconnection)
        self.transport = transport or HttpTransport()

    def trust(self) -> ssl.SSLContext | bool:
        """Return whom to trust, as the HTTP library's `verify`; authorities take 80 ms to load."""
        if not any(url.startswith("https:") for url in self.endpoints.targets):
            return False
        if self.transport.ca_file is None:
            return True
        context = ssl.create_default_context()
        context.load_verify_locations(self.transport.ca_file)
        return context

    def stream_state(self, request: HttpRequest) -> HttpStreamState:
        """Return the state of one stream."""
        return HttpStreamState(request, self.retry_state(), settle_s=self.reconnection.settle_s, clock=time.monotonic)


def base_url(url: str) -> str:
    """Return a gateway's URL without the path `/v1` of OpenAI's base URLs. Raises ValueError for what is no URL."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"a gateway is given as http://host:port or https://host:port, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def call_failure(error: Exception) -> Failure | None:
    """Return the failure that an error of a call stands for; None where the error is not the call's."""
    if isinstance(error, CallRefused):
        return error.failure
    if isinstance(error, httpx2.TransportError):
        return Failure(Code.UNAVAILABLE, str(error) or type(error).__name__)
    return None
