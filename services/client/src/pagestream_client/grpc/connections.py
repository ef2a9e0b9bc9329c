"""The channels to gateways: opened when they are needed, shared by all calls, and replaced."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from pagestream.v1.inference_pb2_grpc import InferenceStub

from pagestream_client.errors import StreamClosed
from pagestream_client.failures import Failure

_LEAVE_S = 2.0
"""Youngest age in seconds at which a connection is replaced: while no gateway reaches Redis, many streams would open
one for each try."""


@dataclass(eq=False)
class Connection:
    """A channel to one gateway. Each open call holds it: one that was replaced is closed with its last call."""

    target: str
    channel: Any
    stub: Any
    since: float


class Connections:
    """One connection to each target. Safe to use from several threads.

    Args:
        connect: opens a channel, of either of gRPC's two APIs.
        clock: returns monotonic seconds.
    """

    def __init__(self, connect: Callable[[str], Any], *, clock: Callable[[], float]) -> None:
        self._connect = connect
        self._clock = clock
        self._open: dict[str, Connection] = {}
        self._closed = False
        self._lock = threading.Lock()

    def to(self, target: str) -> Connection:
        """Return the connection for the next call. Raises StreamClosed after `close`."""
        with self._lock:
            if self._closed:
                raise StreamClosed("the client is closed")
            if target not in self._open:
                self._open[target] = self._made(target)
            return self._open[target]

    def failed(self, connection: Connection | None, failure: Failure) -> None:
        """Note that a call on a connection has failed.

        Where a gateway said that it cannot serve, the next call gets a new connection: one address may stand for many
        gateways, and a connection stays with one of them. Open calls continue on the old one.
        """
        if connection is None or not failure.is_gateway_unable:
            return
        with self._lock:
            is_current = self._open.get(connection.target) is connection
            if is_current and self._clock() - connection.since >= _LEAVE_S:
                del self._open[connection.target]

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> list[Any]:
        """Refuse further calls. Returns the channels, which the caller closes."""
        with self._lock:
            self._closed = True
            channels = [connection.channel for connection in self._open.values()]
            self._open = {}
        return channels

    def _made(self, target: str) -> Connection:
        channel = self._connect(target)
        connection = Connection(target, channel, InferenceStub(channel), self._clock())
        if isinstance(channel, grpc.Channel):  # asyncio's close themselves
            weakref.finalize(connection, channel.close).atexit = False
        return connection
