"""Other words for a connection that is gone, as redis-py's own.

A write to a socket that the other side has just closed raises OSError in asyncio, and RuntimeError in uvloop: redis-py
knows the first alone, so that the second would pass for a fault of the program. Seen when Redis is killed between two
commands on one connection.

And redis-py itself trips over a connection that another task closed while this one was about to write to it: seen with
Sentinels, whose connections all share one, when a process closes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

_UVLOOP_SAYS = "unable to perform operation on"
"""UVHandle._ensure_alive, uvloop 0.22: "unable to perform operation on <TCPTransport ...>; the handler is closed"."""
_WRITER_IS_GONE = "'NoneType' object has no attribute 'write"
"""AbstractConnection._send_packed_command, redis-py 8: `writelines` of a writer that `disconnect` has taken away."""


@contextmanager
def lost_transports_are_told() -> Iterator[None]:
    """Raises redis-py's ConnectionError where the transport was found closed; any other error passes."""
    try:
        yield
    except AttributeError as error:
        if not str(error).startswith(_WRITER_IS_GONE):
            raise
        raise exceptions.ConnectionError(f"the connection was closed: {error}") from error
    except RuntimeError as error:
        if _UVLOOP_SAYS not in str(error):
            raise
        raise exceptions.ConnectionError(f"the connection was closed: {error}") from error
