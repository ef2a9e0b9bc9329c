"""Which ports are free on this machine."""

from __future__ import annotations

import socket

from pagestream_cli.errors import PortTakenError, UsageError

LAST_PORT = 65535


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Connections of an earlier server that are still closing do not count.

    Raises:
        UsageError: `host` is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UsageError(
            f"cannot listen on host {host!r}: {error.strerror}", hint="give an address of this machine with --host"
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free at this moment, chosen by the system."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_free(host: str, ports: dict[str, int]) -> None:
    """Check the ports, given by the option that named each.

    Raises:
        PortTakenError: one of them is in use; the message names option and port.
        UsageError: a port is out of range, or one is named twice.
    """
    seen: dict[int, str] = {}
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
