"""The data folder of a deployment on this machine: its queue, its logs, and the record of its processes.

The record is `serve.json`: which processes a running `pagestream serve` has, and how to reach them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pagestream_telemetry.addresses import ALL_ADDRESSES, IPV4_LOOPBACK, bare_host, loopback_host

from pagestream_cli.errors import DataDirBusyError, DataDirError, ServeFileInvalidError

LEAST_FREE_BYTES = 256 << 20
"""For Redis' files, their rewrite, and the logs."""


def default_data_dir() -> Path:
    """Return `$XDG_DATA_HOME/pagestream`, or `~/.local/share/pagestream`."""
    base = os.environ.get("XDG_DATA_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share"
    return root / "pagestream"


@dataclass(frozen=True)
class DataDir:
    """Paths in a data folder."""

    path: Path

    @classmethod
    def at(cls, path: str | Path | None) -> DataDir:
        """Return the given folder, else the default one. Nothing is created."""
        return cls(default_data_dir() if path is None else Path(path).expanduser().absolute())

    @property
    def serve_file(self) -> Path:
        return self.path / "serve.json"

    @property
    def loaded_file(self) -> Path:
        """Exists once an engine has loaded the model: gateways open no port before."""
        return self.path / "loaded"

    @property
    def lock_file(self) -> Path:
        return self.path / "serve.lock"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def create(self) -> None:
        """Create the folder and its subfolders, readable by their owner alone: they hold prompts and answers.

        Raises:
            DataDirError: a folder cannot be created.
        """
        try:
            for folder in (self.path, self.redis, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DataDirError(
                f"cannot create the data folder {self.path}: {error.strerror}",
                hint="choose another with --data-dir DIR",
            ) from error

    def require_space(self) -> None:
        """Check that the folder's disk has room for Redis' files and the logs.

        Raises:
            DataDirError: it has less than LEAST_FREE_BYTES.
        """
        free = shutil.disk_usage(self.path).free
        if free < LEAST_FREE_BYTES:
            raise DataDirError(
                f"{free >> 20} MB are free at {self.path}, {LEAST_FREE_BYTES >> 20} MB are needed: Redis stops where "
                "its disk is full",
                hint="make room, or choose another folder with --data-dir DIR",
            )


class DataDirLock:
    """Lock a data folder for one process. The kernel releases the lock when the process ends, in whatever way."""

    def __init__(self, data_dir: DataDir) -> None:
        self._data_dir = data_dir
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        file = self._data_dir.lock_file.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise DataDirBusyError(
                f"another pagestream serve (process {holder}) uses {self._data_dir.path}",
                hint="stop it, or give this one its own folder with --data-dir DIR and its own ports",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True)
class ProcessRecord:
    """One process of the deployment."""

    name: str
    """`serve`, `redis`, `gateway-<n>` or `engine-<n>`."""
    pid: int | None
    """None between a crash and the restart."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """By protocol: `http`, `grpc`, `metrics`."""
    restarts: int = 0
    """Number of restarts."""
    log: str = ""
    """File of its output."""
    is_spare: bool = False
    """Whether it is an engine that stands by for the others."""


@dataclass(frozen=True)
class ServeRecord:
    """A running deployment."""

    model: str
    """The served name."""
    redis_url: str
    host: str
    """Address on which the gateways listen."""
    processes: tuple[ProcessRecord, ...]
    started: float
    """Unix seconds."""
    tls_certificate: str = ""
    """File of the certificate with which the gateways serve TLS; empty: no TLS."""
    adapter: str = ""
    """The served name of its LoRA adapter, where the folder of one was named; empty: none."""
    ready: bool = False
    """Whether every gateway and one engine have been ready."""
    version: int = 1
    """Version of this format; readers refuse other versions."""

    @property
    def default_model(self) -> str:
        """The name that requests without one mean: what serve was started with."""
        return self.adapter or self.model

    def http_urls(self) -> tuple[str, ...]:
        """Return the base URL of every gateway."""
        scheme = "https" if self.tls_certificate else "http"
        ports = (process.ports["http"] for process in self.processes if "http" in process.ports)
        return tuple(f"{scheme}://{dial_host(self.host)}:{port}" for port in ports)

    def grpc_targets(self) -> tuple[str, ...]:
        """Return `host:port` of every gateway."""
        return tuple(f"{dial_host(self.host)}:{p.ports['grpc']}" for p in self.processes if "grpc" in p.ports)


def dial_host(listen_host: str) -> str:
    """Return the address at which a program on this machine reaches a listener on `listen_host`."""
    host = bare_host(listen_host)
    if host == ALL_ADDRESSES:
        host = loopback_host()
    elif host in ("0.0.0.0", ""):  # noqa: S104
        host = IPV4_LOOPBACK
    return f"[{host}]" if ":" in host else host


def write_record(path: Path, record: ServeRecord) -> None:
    """Replace the file atomically. Only its owner can read it, since a Redis URL may hold a password."""
    text = json.dumps(asdict(record), indent=2) + "\n"
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


def read_record(path: Path) -> ServeRecord | None:
    """Read the record at `path`; None where there is no file.

    Raises:
        ServeFileInvalidError: the file cannot be read, or does not have the form that serve writes.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ServeFileInvalidError(f"{path} cannot be read: {error}", hint="choose another --data-dir") from error
    try:
        return _parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServeFileInvalidError(
            f"{path} is not a serve.json of this version", hint="remove it, or stop the serve that wrote it"
        ) from error


def _parse(content: dict[str, Any]) -> ServeRecord:
    if content["version"] != 1:
        raise ValueError(content["version"])
    processes = tuple(ProcessRecord(**process) for process in content.pop("processes"))
    return ServeRecord(processes=processes, **content)
