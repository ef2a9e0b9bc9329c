"""Addresses of servers: hosts and ports as text, names of this machine, and sockets of either address family."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from ipaddress import IPv6Address, ip_address
from typing import Any

ALL_ADDRESSES = "::"
"""As a host to listen on: every address of this machine, IPv4 and IPv6."""
IPV4_LOOPBACK = "127.0.0.1"

_LAST_PORT = 65535
_SHARED_PORT_TRIES = 8
"""A port that is free on a name's first address may be taken on its second one."""
_ABSENT = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, default_port: int) -> tuple[str, int]:
    """Split `host[:port]`, where an IPv6 address is in brackets. The host is returned without them.

    Raises:
        ValueError: the text has another form, or the port is out of range.
    """
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        is_valid = bool(closing) and ":" in host and (not rest or rest.startswith(":"))
        port = rest.removeprefix(":")
    else:
        host, _, port = text.partition(":")
        is_valid = bool(host) and ":" not in port
    has_port = port.isascii() and port.isdecimal() and 0 < int(port) <= _LAST_PORT
    if not is_valid or (port and not has_port):
        raise ValueError(f"expected host or host:port, an IPv6 address as [address]:port; got {text!r}")
    return host, int(port or default_port)


def bare_host(host: str) -> str:
    """Return a host without the brackets around an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this machine's own, without a lookup.

    Names under "localhost" are never looked up in the DNS (RFC 6761, section 6.3).
    """
    name = host.lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(unmapped(bare_host(host))).is_loopback
    except ValueError:
        return False


def unmapped(address: str) -> str:
    """Return the IPv4 address that a socket of both families shows as IPv6 (`::ffff:10.0.0.1`); others as they are."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    return str(found.ipv4_mapped) if isinstance(found, IPv6Address) and found.ipv4_mapped else address


def loopback_host() -> str:
    """Return the address by which this machine reaches its own servers of both families: IPv6 where it has that."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return IPV4_LOOPBACK
    return "::1"


def listening_sockets(
    host: str, port: int, prepare: Callable[[socket.socket], None] | None = None
) -> list[socket.socket]:
    """Bind a TCP socket at each address of a host; none of them listens yet.

    `::` and the empty host are every address of both families, by one socket; where the kernel has no IPv6, those of
    IPv4. A name, such as localhost, is each address that it resolves to; those that this machine doesn't have are left
    out as long as there is another.

    Args:
        host: name or address, an IPv6 one in brackets or not.
        port: the same for all addresses; 0 takes a free one.
        prepare: called with each socket before it is bound.

    Raises:
        OSError: the port is taken or is none, or no address is this machine's.
    """
    if not 0 <= port <= _LAST_PORT:
        raise OSError(errno.EINVAL, f"{port} is not a port from 0 to {_LAST_PORT}")
    host = bare_host(host)
    if host in ("", ALL_ADDRESSES):
        try:
            return [_bound(socket.AF_INET6, (ALL_ADDRESSES, port), prepare, both_families=True)]
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
        return [_bound(socket.AF_INET, ("0.0.0.0", port), prepare)]  # noqa: S104 - what was asked for
    addresses = _resolved(host)
    for _ in range(_SHARED_PORT_TRIES - 1):
        try:
            return _bound_at_each(addresses, port, prepare)
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE:
                raise
    return _bound_at_each(addresses, port, prepare)


def _resolved(host: str) -> Sequence[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(errno.EADDRNOTAVAIL, "not a name of a host") from error
    return list({(family, address): None for family, *_, address in found})


def _bound_at_each(
    addresses: Sequence[tuple[socket.AddressFamily, tuple[Any, ...]]],
    port: int,
    prepare: Callable[[socket.socket], None] | None,
) -> list[socket.socket]:
    bound: list[socket.socket] = []
    absent: OSError | None = None
    for family, (name, _, *scope) in addresses:
        try:
            bound.append(_bound(family, (name, port, *scope), prepare))
        except OSError as error:
            if error.errno not in _ABSENT:
                for each in bound:
                    each.close()
                raise
            absent = error
        else:
            port = bound[0].getsockname()[1]
    if not bound and absent is not None:
        raise absent
    return bound


def _bound(
    family: int,
    address: tuple[Any, ...],
    prepare: Callable[[socket.socket], None] | None,
    *,
    both_families: bool = False,
) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both_families:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if prepare is not None:
            prepare(made)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made
