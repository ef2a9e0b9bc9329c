"""What every topology of Redis servers offers: one server, a master that Sentinels name, a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol

from redis.asyncio.client import PubSub

from pagestream_streams.protocol.records import Argument

Command = Sequence[Argument]


class Topology(Protocol):
    """Sends commands to the server that has their key. Errors are redis-py's.

    A pipeline's reply may be an exception in the place of its command; it is never raised.
    """

    @property
    def is_cluster(self) -> bool:
        """Whether some keys can be unreachable while others are served."""

    async def execute(self, *command: Argument) -> Any:
        """Run one command."""

    async def pipeline(self, commands: Sequence[Command], limit_s: float | None = None) -> list[Any]:
        """Run commands in one round trip to each server.

        The replies of a server that has not answered within `limit_s` seconds are TimeoutError.
        """

    async def execute_on_each(self, *command: Argument) -> list[Any]:
        """Run a command without a key on each master; return a reply or an exception for each."""

    async def pipeline_to(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """Run commands on one connection to the server that has `key`."""

    def pubsub(self) -> PubSub:
        """Return a subscriber on a connection of its own."""

    async def drop_idle(self) -> None:
        """Close the connections on which no command waits; the next command opens them again."""

    async def close(self) -> None:
        """Close every connection."""


async def close_idle(idle: MutableSequence[Any]) -> None:
    """Close the redis-py connections in a pool's list of free ones; they are not to be taken meanwhile.

    The list has them again afterwards, and each connects anew when it is used. TLS is closed without the other side's
    answer, which may be silent.
    """
    taken = list(idle)
    idle.clear()
    try:
        await asyncio.gather(*(connection.disconnect(nowait=True) for connection in taken), return_exceptions=True)
    finally:
        idle.extend(taken)
