"""The connections of one process to Redis: scripts by their hash, and Redis' errors as this package's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pagestream_streams.entries import Argument
from pagestream_streams.errors import Unavailable
from pagestream_streams.scripts import Script
from pagestream_streams.settings import StreamsSettings

# Words in replies of a server that is there and can't serve now. Errors raised inside a script carry them behind a
# prefix.
_NOT_NOW = ("LOADING", "READONLY", "OOM ", "MISCONF", "BUSY ", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")

_RECONNECT_PAUSE_S = 0.1


class Call(NamedTuple):
    """One run of a script."""

    script: Script
    key: str
    arguments: Sequence[Argument]


class Connection:
    """A pool of connections. redis-py's own retries are off: what may be repeated is said by each script."""

    def __init__(self, url: str, settings: StreamsSettings) -> None:
        """Connects nothing yet. ValueError for a malformed URL."""
        self.url = url
        self._timeout = settings.command_timeout_s
        self._connect_timeout = settings.connect_timeout_s
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=settings.max_connections,
            timeout=settings.command_timeout_s,
            socket_timeout=settings.command_timeout_s,
            socket_connect_timeout=settings.command_timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._redis = Redis(connection_pool=pool)
        self._command: Callable[..., Awaitable[Any]] = self._redis.execute_command
        self._pool = pool

    async def open(self) -> None:
        """Waits for a server that answers. Unavailable after settings.connect_timeout_s."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._connect_timeout
        while True:
            try:
                await self.execute("PING")
            except Unavailable:
                if loop.time() > limit:
                    raise
                await asyncio.sleep(_RECONNECT_PAUSE_S)
            else:
                return

    async def close(self) -> None:
        """Closes every connection."""
        await self._redis.aclose()
        await self._pool.disconnect()

    async def execute(self, *command: Argument) -> Any:
        """Runs one command. Unavailable where Redis can't."""
        async with _translated():
            return await self._command(*command)

    async def pipeline(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Runs commands in one round trip. Unavailable where Redis can't; a reply that is an error is raised."""
        if not commands:
            return []
        async with _translated(), self._redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return list(await pipe.execute())

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
        if not calls:
            return []
        async with _translated(), self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command("EVALSHA", call.script.sha, 1, call.key, *call.arguments)
            replies = await pipe.execute(raise_on_error=False)
        for place, (call, reply) in enumerate(zip(calls, replies, strict=True)):
            if isinstance(reply, exceptions.NoScriptError):
                replies[place] = await self.run(call.script, call.key, *call.arguments)
            elif isinstance(reply, Exception):
                async with _translated():
                    raise reply
        return list(replies)

    async def _evaluate(self, script: Script, key: str, arguments: Sequence[Argument]) -> Any:
        async with _translated():
            try:
                return await self._command("EVALSHA", script.sha, 1, key, *arguments)
            except exceptions.NoScriptError:
                # EVAL caches the text as well. A restarted server has forgotten it.
                return await self._command("EVAL", script.text, 1, key, *arguments)

    def pubsub(self) -> PubSub:
        """A subscriber on a connection of its own."""
        return self._redis.pubsub()


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except (
        exceptions.ConnectionError,
        exceptions.TimeoutError,
        exceptions.OutOfMemoryError,
        exceptions.ReadOnlyError,
    ) as error:
        raise Unavailable(f"Redis can't serve: {error}") from error
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"Redis can't be reached: {error}") from error
    except exceptions.ResponseError as error:
        if any(word in str(error) for word in _NOT_NOW):
            raise Unavailable(f"Redis can't serve now: {error}") from error
        raise
