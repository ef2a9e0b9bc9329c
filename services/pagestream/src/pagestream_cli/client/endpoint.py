"""Which gateways a command calls, and with which key."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass

from pagestream_cli.datadir import DataDir, read_record
from pagestream_cli.errors import ServerNotFoundError, UsageError
from pagestream_cli.supervisor.guard import is_alive

API_KEY_VARIABLE = "PAGESTREAM_CLIENT__API_KEY"
KEY_VARIABLES = (API_KEY_VARIABLE, "VLLM_API_KEY", "OPENAI_API_KEY")
"""Variables with the key that commands send; the first that is set counts."""


@dataclass(frozen=True)
class Endpoint:
    """The gateways of one deployment."""

    urls: tuple[str, ...]
    """Base URL of each gateway, without a path; a broken stream continues at another one."""
    api_key: str | None = None
    ca_file: str | None = None
    """Certificates to trust beside the usual ones: that of the deployment itself."""
    model: str | None = None
    """What the deployment was started with; None: not known."""

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of connections; None where the gateways speak none."""
        if not self.urls[0].startswith("https:"):
            return None
        context = ssl.create_default_context()
        if self.ca_file is not None:
            context.load_verify_locations(self.ca_file)
        return context

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def find_endpoint(url: str | None, data_dir: DataDir, api_key: str | None = None) -> Endpoint:
    """Return the deployment at `url`, else the one that serve runs in `data_dir`.

    Raises:
        ServerNotFoundError: no serve runs there.
        UsageError: `url` is not http(s)://host[:port].
    """
    key = known_api_key(api_key)
    if url is not None:
        return Endpoint((_checked(url),), key)
    record = read_record(data_dir.serve_file)
    supervisor = next((p.pid for p in record.processes if p.name == "serve"), None) if record else None
    if record is None or supervisor is None or not is_alive(supervisor):
        raise ServerNotFoundError(
            f"no pagestream serve runs in {data_dir.path}",
            hint="start one with `pagestream serve`, or name a server with --url http://HOST:PORT",
        )
    return Endpoint(record.http_urls(), key, record.tls_certificate or None, record.default_model)


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url} is not a URL", hint="give http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def known_api_key(given: str | None = None) -> str | None:
    """Return the key that was given, else that of the environment; None where no key is sent."""
    return given or next((key for name in KEY_VARIABLES if (key := os.environ.get(name))), None)
