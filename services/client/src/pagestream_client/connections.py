"""The connections to gateways: made when they are needed, shared by all calls, and left for new ones."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from pagestream.v1.inference_pb2_grpc import InferenceStub

from pagestream_client.errors import StreamClosed
from pagestream_client.status import Failure

_LEAVE_S = 2.0
"""No connection is left before it is so old: while no gateway has Redis, many streams would make one for each try."""


@dataclass(eq=False)
class Connection:
    """To one gateway. Whoever has a call holds it: one that was left is closed when nobody holds it any more."""

    target: str
    channel: Any
    stub: Any
    since: float


class Connections:
    """One to each target. Safe to use from several threads."""

    def __init__(self, connect: Callable[[str], Any], *, clock: Callable[[], float]) -> None:
        """`connect` makes a channel, of either of gRPC's two APIs; `clock` tells monotonic seconds."""
        self._connect = connect
        self._clock = clock
        self._open: dict[str, Connection] = {}
        self._closed = False
        self._lock = threading.Lock()

    def to(self, target: str) -> Connection:
        """The connection for the next call. StreamClosed after `close`."""
        with self._lock:
            if self._closed:
                raise StreamClosed("the client is closed")
            if target not in self._open:
                self._open[target] = self._made(target)
            return self._open[target]

    def failed(self, connection: Connection | None, failure: Failure) -> None:
        """A call on it has failed. Where a gateway said that it cannot serve, the next call gets a new connection: one
        address may stand for many gateways, and a connection stays with one of them. Calls that are open go on.
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
        """From now on there are none. Returns the channels, which the caller closes."""
        with self._lock:
            self._closed = True
            channels = [connection.channel for connection in self._open.values()]
            self._open = {}
        return channels

    def _made(self, target: str) -> Connection:
        channel = self._connect(target)
        connection = Connection(target, channel, InferenceStub(channel), self._clock())
        if isinstance(channel, grpc.Channel):  # those of asyncio close themselves
            weakref.finalize(connection, channel.close).atexit = False
        return connection
