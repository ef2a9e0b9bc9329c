"""toxiproxy, whose server carries TCP connections and, when asked, cuts, delays, resets or truncates them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from support.processes.part import WITH_PARENT, Part
from support.processes.stack import free_port
from support.processes.waiting import LIMIT_S, wait_until
from support.redis.servers import skip_for_want_of

PROGRAM = "toxiproxy-server"


class Link:
    """One way to a server. `port` is where its clients connect."""

    def __init__(self, client: httpx.Client, name: str, upstream_port: int) -> None:
        """Begin to carry."""
        self.port = free_port()
        self._client, self._path = client, f"/proxies/{name}"
        listen, upstream = f"127.0.0.1:{self.port}", f"127.0.0.1:{upstream_port}"
        self._post("/proxies", {"name": name, "listen": listen, "upstream": upstream, "enabled": True})

    def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        self._post(self._path, {"enabled": False})

    def mend(self) -> None:
        """Accept connections again."""
        self._post(self._path, {"enabled": True})

    def add(self, toxic: str, *, stream: str = "downstream", **attributes: Any) -> None:
        """Add a toxic of a kind, such as "latency", to what servers ("downstream") or clients ("upstream") send."""
        body = {"name": f"{toxic}-{stream}", "type": toxic, "stream": stream, "attributes": attributes}
        self._post(f"{self._path}/toxics", body)

    def remove(self, toxic: str, *, stream: str = "downstream") -> None:
        """Remove a toxic."""
        self._client.delete(f"{self._path}/toxics/{toxic}-{stream}").raise_for_status()

    def _post(self, path: str, body: Any) -> None:
        self._client.post(path, json=body).raise_for_status()


class Toxiproxy:
    """A running server. `link` opens a way."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def link(self, name: str, upstream_port: int) -> Link:
        """Carry connections from a free port to this one."""
        return Link(self._client, name, upstream_port)


@contextmanager
def running_toxiproxy(folder: Path) -> Iterator[Toxiproxy]:
    """Run toxiproxy for the length of a block. Skips the test without the program."""
    binary = shutil.which(PROGRAM)
    if binary is None:
        skip_for_want_of("toxiproxy", f"{PROGRAM} is not on the PATH")
        raise AssertionError
    port = free_port()
    part = Part("toxiproxy", [*WITH_PARENT, binary, "-host", "127.0.0.1", "-port", str(port)], folder / "toxiproxy.log")
    part.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
            wait_until(lambda: _answers(client), f"toxiproxy {part.log_tail()}")
            yield Toxiproxy(client)
    finally:
        part.stop()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/version").is_success
    except httpx.TransportError:
        return False
