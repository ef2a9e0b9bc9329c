"""How gRPC connections are made, watched, shared by all calls, and replaced."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.inference_pb2_grpc import InferenceStub

from pagestream_client.errors import Position, StreamClosed
from pagestream_client.grpc.stream_state import GrpcStreamState
from pagestream_client.retry import Configuration, Failure, Reconnection


@dataclass(frozen=True)
class Transport:
    """Limits of connections and calls, in seconds."""

    connect_timeout_s: float = 3.0
    """Until a gateway that does not answer at all counts as failed."""
    keepalive_s: float = 6.0
    """Interval of probes of a silent connection. Gateways refuse clients that probe more often than every 5 s."""
    keepalive_timeout_s: float = 2.0
    """Until an unanswered probe ends the connection. Only probes detect a cut cable and a stopped process.

    A request is cancelled when it had no reader for the remaining lease of its gateway (1.5 s) and the grace period
    (10 s). The interval and this time-out, with one try at another gateway that is dead too, must take less."""
    answer_timeout_s: float = 10.0
    """Time-out of a call that is no stream."""

    def options(self) -> list[tuple[str, int]]:
        """Return the channel arguments of gRPC."""
        return [
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
            # gRPC sends no keepalive probe while a probe of its flow control is unanswered; the default is 60 s.
            ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),
            ("grpc.http2.max_pings_without_data", 0),
            # In spite of its name, this is also the connection time-out.
            ("grpc.min_reconnect_backoff_ms", _ms(self.connect_timeout_s)),
            # By default gRPC waits up to two minutes before it tries a gateway again.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.enable_retries", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


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


_TARGET = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}")


class GrpcConfiguration(Configuration):
    """Gateways as "host:port", with what each call and each channel carries.

    Raises:
        ValueError: there is no target, or one is not "host:port".
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        api_key: str | None,
        credentials: grpc.ChannelCredentials | None,
        reconnection: Reconnection | None,
        transport: Transport | None,
    ) -> None:
        super().__init__(checked_targets([targets] if isinstance(targets, str) else targets), reconnection)
        self.metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self.credentials = credentials
        self.transport = transport or Transport()

    def stream_state(
        self, start: api.GenerateRequest | Position, *, deadline_s: float | None = None
    ) -> GrpcStreamState:
        """Return the state of one stream."""
        return GrpcStreamState(
            start,
            self.retry_state(),
            deadline_s=deadline_s,
            settle_s=self.reconnection.settle_s,
            clock=time.monotonic,
        )


def checked_targets(targets: Sequence[str]) -> Sequence[str]:
    """Return the targets. Raises ValueError unless each is "host:port"."""
    for target in targets:
        if not _TARGET.fullmatch(target):
            raise ValueError(f"a gateway is given as 'host:port' (or '[address]:port'), got {target!r}")
    return targets
