"""Which ports are free on this machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

from pagestream_cli.errors import PortTakenError, UsageError

LAST_PORT = 65535


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is this machine's own alone."""
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Connections of an earlier server that are still closing do not count.

    Raises:
        UsageError: `host` is no address of this machine.
    """
    with _socket(host, port) as (probe, address):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise _no_address(host, error) from error
            return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free at this moment, chosen by the system.

    Raises:
        UsageError: `host` is no address of this machine.
    """
    with _socket(host, 0) as (probe, address):
        try:
            probe.bind(address)
        except OSError as error:
            raise _no_address(host, error) from error
        return int(probe.getsockname()[1])


@contextmanager
def _socket(host: str, port: int) -> Iterator[tuple[socket.socket, Any]]:
    """Open a socket of the family of `host`, with the address to bind it to. Raises UsageError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _no_address(host, error) from error
    with opened:
        yield opened, address


def _no_address(host: str, error: Exception) -> UsageError:
    text = getattr(error, "strerror", None) or error
    return UsageError(f"cannot listen on host {host!r}: {text}", hint="give an address of this machine with --host")


def require_free(host: str, ports: dict[str, int], *, beside: Mapping[str, int] | None = None) -> None:
    """Check the ports, given by the option that named each; `beside` are those that were checked before.

    Raises:
        PortTakenError: one of them is in use; the message names option and port.
        UsageError: a port is out of range, or one is named twice.
    """
    seen = {port: option for option, port in (beside or {}).items()}
    for option, port in ports.items():
        if not 0 < port <= LAST_PORT:
            raise UsageError(f"{option} {port} is not a port", hint=f"give a number from 1 to {LAST_PORT}")
        if port in seen:
            raise UsageError(
                f"{option} and {seen[port]} both ask for port {port}", hint="several gateways take consecutive ports"
            )
        seen[port] = option
        if not is_free(host, port):
            raise PortTakenError(
                f"port {port} ({option}) is in use on {host}",
                hint=f"stop what uses it, or choose another with {option}",
            )
