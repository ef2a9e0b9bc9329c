"""Translate what redis-py, asyncio and uvloop raise into this package's errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from redis import exceptions

from pagestream_streams.errors import StorageFull, Unavailable

# Words in replies of a server that runs and can't serve now. Errors raised inside a script carry them behind a prefix.
_NOT_NOW = ("LOADING", "READONLY", "MISCONF", "BUSY ", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")

_FULL = "OOM "

# What a cluster answers, or redis-py in its stead, while slots move or have no owner.
_CHANGING = (
    exceptions.RedisClusterException,
    exceptions.ClusterError,
    exceptions.AskError,
    exceptions.TryAgainError,
)

_UVLOOP_CLOSED = "unable to perform operation on"
"""UVHandle._ensure_alive, uvloop 0.22: "unable to perform operation on <TCPTransport ...>; the handler is closed"."""
_WRITER_CLOSED = "'NoneType' object has no attribute 'write"
"""AbstractConnection._send_packed_command, redis-py 8: `writelines` of a writer that `disconnect` has set to None."""


@contextmanager
def closed_transport_as_connection_error() -> Iterator[None]:
    """Raise redis-py's ConnectionError where the transport was found closed; let every other error pass.

    A write to a socket that the other side has just closed raises OSError in asyncio, and RuntimeError in uvloop, which
    redis-py does not know: it would pass for a fault of the program. Seen when Redis is killed between two commands on
    one connection. And redis-py fails with AttributeError on a connection that another task closed while this one was
    about to write: seen with Sentinels, whose connections share one writer, when a process closes them.
    """
    try:
        yield
    except AttributeError as error:
        if not str(error).startswith(_WRITER_CLOSED):
            raise
        raise exceptions.ConnectionError(f"the connection was closed: {error}") from error
    except RuntimeError as error:
        if _UVLOOP_CLOSED not in str(error):
            raise
        raise exceptions.ConnectionError(f"the connection was closed: {error}") from error


def translated_replies(replies: Sequence[Any]) -> list[Any]:
    """Return replies with Unavailable in place of each error that means "not now"; raise faults of the program.

    An error that stands for many replies, as that of a silent server does, is translated once.
    """
    known: dict[int, Unavailable] = {}
    for reply in replies:
        if isinstance(reply, Exception) and id(reply) not in known:
            try:
                with _translated():
                    raise reply
            except Unavailable as error:
                known[id(reply)] = error
    return [known.get(id(reply), reply) for reply in replies]


@asynccontextmanager
async def translated_errors() -> AsyncIterator[None]:
    """Raise Unavailable, as in translated_replies, for what is raised inside. It is StorageFull at the memory limit."""
    with _translated():
        yield


@contextmanager
def _translated() -> Iterator[None]:
    """Raise Unavailable, chained, for every error that means "not now"; let faults of the program pass.

    It is StorageFull where Redis is at its memory limit.
    """
    try:
        with closed_transport_as_connection_error():
            yield
    except exceptions.OutOfMemoryError as error:
        raise StorageFull(f"Redis is at its memory limit: {error}") from error
    except (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError) as error:
        raise Unavailable(f"Redis can't serve: {error}") from error
    except exceptions.InvalidResponse as error:  # redis-py has closed the connection
        raise Unavailable(f"the server's reply is not Redis protocol: {error}") from error
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"Redis can't be reached: {error}") from error
    except _CHANGING as error:
        raise Unavailable(f"the cluster is changing: {error}") from error
    except exceptions.ResponseError as error:
        if _FULL in str(error):
            raise StorageFull(f"Redis is at its memory limit: {error}") from error
        if any(word in str(error) for word in _NOT_NOW):
            raise Unavailable(f"Redis can't serve now: {error}") from error
        raise
