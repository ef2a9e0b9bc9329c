"""The connections of one process to Redis: scripts by their hash, and Redis' errors as this package's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio.client import PubSub

from pagestream_streams.connection.cluster import ClusterLink
from pagestream_streams.connection.durability import Durability
from pagestream_streams.connection.lost_transports import lost_transports_are_told
from pagestream_streams.connection.scripts import Script
from pagestream_streams.connection.topologies import open_link
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.entries import Argument
from pagestream_streams.settings import StreamsSettings

# Words in replies of a server that is there and can't serve now. Errors raised inside a script carry them behind a
# prefix.
_NOT_NOW = ("LOADING", "READONLY", "OOM ", "MISCONF", "BUSY ", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")

# What a cluster answers, or redis-py in its stead, while slots move or have no owner.
_CHANGING = (
    exceptions.RedisClusterException,
    exceptions.ClusterError,
    exceptions.AskError,
    exceptions.TryAgainError,
)

_RECONNECT_PAUSE_S = 0.1
_LOADING_LIMIT_S = 900.0  # for a server that reads its files: 126 MB of logs took 16 s on two busy cores


class Call(NamedTuple):
    """One run of a script."""

    script: Script
    key: str
    arguments: Sequence[Argument]


class Connection:
    """A process' way to Redis. redis-py's own retries are off: what may be repeated is said by each script."""

    def __init__(self, url: str, settings: StreamsSettings) -> None:
        """Connects nothing yet. ValueError for a malformed URL; see links.open_link."""
        self.url = url
        self._connect_timeout = settings.connect_timeout_s
        self._durability = Durability.of(settings)
        self._link = open_link(url, settings)

    @property
    def is_divided(self) -> bool:
        """Whether one part of the keys may be away while others are there."""
        return isinstance(self._link, ClusterLink)

    @property
    def waits(self) -> bool:
        """Whether a write counts only when it is on disk or on replicas, as the settings ask."""
        return self._durability.waits

    async def open(self) -> None:
        """Waits for a server that answers. Unavailable after settings.connect_timeout_s without one.

        A server that loads its files says so, and is waited for up to _LOADING_LIMIT_S.
        """
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._connect_timeout
        loaded_by = loop.time() + _LOADING_LIMIT_S
        while True:
            try:
                await self.execute("PING")
            except Unavailable as error:
                if isinstance(error.__cause__, exceptions.BusyLoadingError):
                    limit = min(loop.time() + self._connect_timeout, loaded_by)
                if loop.time() > limit:
                    raise
                await asyncio.sleep(_RECONNECT_PAUSE_S)
            else:
                return

    async def close(self) -> None:
        """Closes every connection."""
        await self._link.close()

    async def execute(self, *command: Argument) -> Any:
        """Runs one command. Unavailable where Redis can't."""
        async with _translated():
            return await self._link.execute(*command)

    async def pipeline(self, commands: Sequence[Sequence[Argument]], limit_s: float | None = None) -> list[Any]:
        """Runs commands in one round trip. Unavailable where Redis can't, or not in time; a reply that is an error is
        raised.
        """
        if not commands:
            return []
        async with _translated():
            replies = await self._link.pipeline(commands, limit_s)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return replies

    async def run(self, script: Script, key: str, *arguments: Argument) -> Any:
        """Runs a script. Unavailable where Redis can't; then it has run wholly, or not at all."""
        try:
            return await self._evaluate(script, key, arguments)
        except Unavailable as error:
            if not script.repeat or not isinstance(error.__cause__, exceptions.ConnectionError):
                raise
        return await self._evaluate(script, key, arguments)

    async def run_many(self, calls: Sequence[Call]) -> list[Any]:
        """Runs scripts in one round trip, each atomic by itself. Unavailable where one of them can't run."""
        replies = await self.run_each(calls)
        for reply in replies:
            if isinstance(reply, Unavailable):
                raise reply
        return replies

    async def run_each(self, calls: Sequence[Call], limit_s: float | None = None) -> list[Any]:
        """As `run_many`; in place of the reply of one that can't run is an Unavailable: where a cluster's node is away,
        or silent for longer than the limit, others are there. Unavailable where none can.
        """
        if not calls:
            return []
        async with _translated():
            replies = await self._link.pipeline(
                [("EVALSHA", call.script.sha, *_keys(call.key), *call.arguments) for call in calls], limit_s
            )
        for place, (call, reply) in enumerate(zip(calls, replies, strict=True)):
            try:
                if isinstance(reply, exceptions.NoScriptError):
                    replies[place] = await self.run(call.script, call.key, *call.arguments)
                elif isinstance(reply, Exception):
                    async with _translated():
                        raise reply
            except Unavailable as error:
                replies[place] = error
        if all(isinstance(reply, Unavailable) for reply in replies):
            raise replies[0]
        return list(replies)

    async def run_acknowledged(self, script: Script, key: str, *arguments: Argument) -> Any:
        """As `run`, and waits until the writes are as safe as the settings ask: on disk, on replicas.

        Unavailable also where that isn't so in time; the script may have run then, and a retry waits anew.
        """
        if not self._durability.waits:
            return await self.run(script, key, *arguments)
        try:
            return await self._evaluate_together(script, key, arguments)
        except Unavailable as error:
            if not script.repeat or not isinstance(error.__cause__, exceptions.ConnectionError):
                raise
        return await self._evaluate_together(script, key, arguments)

    async def run_each_acknowledged(self, calls: Sequence[Call], limit_s: float | None = None) -> list[Any]:
        """As `run_each`, each as `run_acknowledged`, which has limits of its own where it waits."""
        if not self._durability.waits:
            return await self.run_each(calls, limit_s)
        runs = (self.run_acknowledged(call.script, call.key, *call.arguments) for call in calls)
        replies = await asyncio.gather(*runs, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, Unavailable):
                raise reply
        if replies and all(isinstance(reply, Unavailable) for reply in replies):
            raise replies[0]
        return replies

    async def read_acknowledged(self, key: str, *command: Argument) -> Any:
        """Runs a command that reads; answers once all that it may show is as safe as the settings ask. `key` is the
        partition's prefix. Unavailable.
        """
        if not self._durability.waits:
            return await self.execute(*command)
        return await self._together(key, command)

    async def _evaluate_together(self, script: Script, key: str, arguments: Sequence[Argument]) -> Any:
        try:
            return await self._together(key, ("EVALSHA", script.sha, *_keys(key), *arguments))
        except exceptions.NoScriptError:
            return await self._together(key, ("EVAL", script.text, *_keys(key), *arguments))

    async def _together(self, key: str, command: Sequence[Argument]) -> Any:
        async with _translated():
            reply, touched, reached = await self._link.together(key, [command, *self._durability.commands(key)])
            for each in (reply, touched):
                if isinstance(each, Exception):
                    raise each
            self._durability.check(reached)
        return reply

    async def _evaluate(self, script: Script, key: str, arguments: Sequence[Argument]) -> Any:
        async with _translated():
            try:
                return await self._link.execute("EVALSHA", script.sha, *_keys(key), *arguments)
            except exceptions.NoScriptError:
                # EVAL caches the text as well. A restarted server has forgotten it.
                return await self._link.execute("EVAL", script.text, *_keys(key), *arguments)

    async def drop_idle(self) -> None:
        """Closes the connections that nothing waits on: one of them may be as silent as one that was waited on."""
        await self._link.drop_idle()

    def pubsub(self) -> PubSub:
        """A subscriber on a connection of its own."""
        return self._link.pubsub()


def _keys(key: str) -> tuple[Argument, ...]:
    """How many keys a script names, and the keys.

    A partition's script takes the keys' common beginning, and a second name that is never a key either. While a cluster
    moves the slot, each of two nodes has some of the keys: a script that names one missing key would be sent on to the
    new node (ASK), and find nothing there. Two of them are refused until all have moved (TRYAGAIN).
    """
    return (2, key, f"{key}whole") if "{" in key else (1, key)


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        with lost_transports_are_told():
            yield
    except (
        exceptions.ConnectionError,
        exceptions.TimeoutError,
        exceptions.OutOfMemoryError,
        exceptions.ReadOnlyError,
    ) as error:
        raise Unavailable(f"Redis can't serve: {error}") from error
    except exceptions.InvalidResponse as error:  # redis-py has closed the connection
        raise Unavailable(f"what answers does not speak as Redis does: {error}") from error
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"Redis can't be reached: {error}") from error
    except _CHANGING as error:
        raise Unavailable(f"the cluster is changing: {error}") from error
    except exceptions.ResponseError as error:
        if any(word in str(error) for word in _NOT_NOW):
            raise Unavailable(f"Redis can't serve now: {error}") from error
        raise
