"""serve.json: which processes a running `pagestream serve` has, and how to reach them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagestream_telemetry.addresses import ALL_ADDRESSES, IPV4_LOOPBACK, bare_host, loopback_host

from pagestream_cli.errors import ServeFileInvalidError


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
