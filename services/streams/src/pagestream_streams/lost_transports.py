"""uvloop's word for a connection that is gone, as redis-py's.

A write to a socket that the other side has just closed raises OSError in asyncio, and RuntimeError in uvloop: redis-py
knows the first alone, so that the second would pass for a fault of the program. Seen when Redis is killed between two
commands on one connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

_UVLOOP_SAYS = "unable to perform operation on"
"""UVHandle._ensure_alive, uvloop 0.22: "unable to perform operation on <TCPTransport ...>; the handler is closed"."""


@contextmanager
def lost_transports_are_told() -> Iterator[None]:
    """Raises redis-py's ConnectionError where uvloop found the transport closed; any other error passes."""
    try:
        yield
    except RuntimeError as error:
        if _UVLOOP_SAYS not in str(error):
            raise
        raise exceptions.ConnectionError(f"the connection was closed: {error}") from error
