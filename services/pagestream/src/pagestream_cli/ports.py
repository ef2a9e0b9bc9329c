"""Which ports are free on this machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pagestream_telemetry.addresses import listening_sockets

from pagestream_cli.errors import PortTakenError, UsageError

LAST_PORT = 65535
_IN_USE = (errno.EADDRINUSE, errno.EACCES)
"""A port below 1024 that this user may not bind counts as one that is taken."""


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Connections of an earlier server that are still closing do not count.

    Raises:
        UsageError: `host` is no address of this machine.
    """
    try:
        with _bound(host, port) as sockets:
            for each in sockets:
                each.listen(1)
    except OSError as error:
        if error.errno in _IN_USE:
            return False
        raise _no_address(host, error) from error
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free at this moment on each address of a host, chosen by the system.

    Raises:
        UsageError: `host` is no address of this machine.
    """
    try:
        with _bound(host, 0) as sockets:
            return int(sockets[0].getsockname()[1])
    except OSError as error:
        raise _no_address(host, error) from error


@contextmanager
def _bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Bind what a server would listen on. Raises OSError."""
    sockets = listening_sockets(host, port)
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


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
