"""The connections of one process to Redis: commands, and scripts by their hash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio.client import PubSub

from pagestream_streams.connection.base import Command, Topology
from pagestream_streams.connection.durability import Durability
from pagestream_streams.connection.error_translation import translated_errors, translated_replies
from pagestream_streams.connection.scripts import Script
from pagestream_streams.connection.topologies import open_topology
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.keys import Keyspace
from pagestream_streams.protocol.records import Argument
from pagestream_streams.settings import StreamsSettings

_RECONNECT_PAUSE_S = 0.1
_LOADING_LIMIT_S = 900.0  # for a server that reads its files: 126 MB of logs took 16 s on two busy cores


class Call(NamedTuple):
    """One run of a script."""

    script: Script
    key: str
    arguments: Sequence[Argument]


class Connection:
    """Runs commands and scripts. redis-py's own retries are off: each script says whether it may be repeated.

    Every method raises Unavailable where Redis can't be reached or can't serve now.
    """

    def __init__(self, url: str, settings: StreamsSettings, topology: Topology | None = None) -> None:
        """Create it without connecting. ValueError for a malformed URL, see topologies.open_topology.

        `topology`: used in place of the URL's.
        """
        self.url = url
        self.keyspace = Keyspace(settings.key_prefix)
        self._connect_timeout = settings.connect_timeout_s
        self._durability = Durability.of(settings)
        self.topology = topology or open_topology(url, settings)

    @property
    def is_cluster(self) -> bool:
        """Whether some keys can be unreachable while others are served."""
        return self.topology.is_cluster

    @property
    def waits_for_durability(self) -> bool:
        """Whether a write counts only when it is on disk or on replicas, as the settings ask."""
        return self._durability.is_required

    async def open(self) -> None:
        """Wait for a server that answers. Unavailable after settings.connect_timeout_s without one.

        A server that is loading its files gets up to _LOADING_LIMIT_S seconds.
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
        """Close every connection."""
        await self.topology.close()

    async def execute(self, *command: Argument) -> Any:
        """Run one command."""
        async with translated_errors():
            return await self.topology.execute(*command)

    async def execute_on_each(self, *command: Argument) -> list[Any]:
        """Run a command without a key on each master. Unavailable where one of them does not answer."""
        async with translated_errors():
            replies = await self.topology.execute_on_each(*command)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return replies

    async def pipeline(self, commands: Sequence[Sequence[Argument]], limit_s: float | None = None) -> list[Any]:
        """Run commands in one round trip; raise the first reply that is an error.

        `limit_s`: seconds after which a silent server counts as unreachable.
        """
        if not commands:
            return []
        async with translated_errors():
            replies = await self.topology.pipeline(commands, limit_s)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return replies

    async def run(self, script: Script, key: str, *arguments: Argument) -> Any:
        """Run a script. After Unavailable it has run as a whole, or not at all."""
        try:
            return await self._evaluate(script, key, arguments)
        except Unavailable as error:
            if not script.repeat or not isinstance(error.__cause__, exceptions.ConnectionError):
                raise
        return await self._evaluate(script, key, arguments)

    async def run_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip, each of them atomic. Unavailable where one of them can't run."""
        replies = await self.run_each(calls)
        for reply in replies:
            if isinstance(reply, Unavailable):
                raise reply
        return replies

    async def run_each(self, calls: Sequence[Call | Command], limit_s: float | None = None) -> list[Any]:
        """Run scripts, and plain commands beside them, with Unavailable in place of the reply of each that can't run.

        So one node of a cluster that is unreachable, or silent for `limit_s` seconds, does not fail the calls to the
        others. Unavailable is raised where none of them can run.
        """
        if not calls:
            return []
        async with translated_errors():
            replies = await self.topology.pipeline([_command(call) for call in calls], limit_s)
            # One text makes a server know a script, so a second round is enough for one server.
            while unknown := [
                place for place, each in enumerate(replies) if isinstance(each, exceptions.NoScriptError)
            ]:
                first = {_command(calls[place])[1]: place for place in reversed(unknown)}.values()
                commands = [_command(calls[place], by_text=place in first) for place in unknown]
                for place, each in zip(unknown, await self.topology.pipeline(commands, limit_s), strict=True):
                    replies[place] = each
        replies = translated_replies(replies)
        if all(isinstance(reply, Unavailable) for reply in replies):
            raise replies[0]
        return replies

    async def run_acknowledged(self, script: Script, key: str, *arguments: Argument) -> Any:
        """Run a script as `run`, and wait until its writes are on disk and on replicas as the settings ask.

        Unavailable also where they aren't in time; the script may have run then, and a retry waits again.
        """
        if not self._durability.is_required:
            return await self.run(script, key, *arguments)
        try:
            return await self._evaluate_together(script, key, arguments)
        except Unavailable as error:
            if not script.repeat or not isinstance(error.__cause__, exceptions.ConnectionError):
                raise
        return await self._evaluate_together(script, key, arguments)

    async def run_each_acknowledged(self, calls: Sequence[Call], limit_s: float | None = None) -> list[Any]:
        """Run scripts as `run_each`, each with the wait of `run_acknowledged`, for which `limit_s` does not count."""
        if not self._durability.is_required:
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
        """Run a reading command, and wait until all that its reply may show is as durable as the settings ask.

        `key` is the partition's prefix.
        """
        if not self._durability.is_required:
            return await self.execute(*command)
        return await self._together(key, command)

    async def _evaluate_together(self, script: Script, key: str, arguments: Sequence[Argument]) -> Any:
        try:
            return await self._together(key, ("EVALSHA", script.sha, *_keys(key), *arguments))
        except exceptions.NoScriptError:
            return await self._together(key, ("EVAL", script.text, *_keys(key), *arguments))

    async def _together(self, key: str, command: Sequence[Argument]) -> Any:
        async with translated_errors():
            reply, *waited = await self.topology.pipeline_to(key, [command, *self._durability.commands(key)])
            if isinstance(reply, Exception):
                raise reply
            self._durability.check(waited)
        return reply

    async def _evaluate(self, script: Script, key: str, arguments: Sequence[Argument]) -> Any:
        async with translated_errors():
            try:
                return await self.topology.execute("EVALSHA", script.sha, *_keys(key), *arguments)
            except exceptions.NoScriptError:
                # EVAL caches the text as well. A restarted server has forgotten it.
                return await self.topology.execute("EVAL", script.text, *_keys(key), *arguments)

    async def drop_idle(self) -> None:
        """Close the connections on which no command waits; the next command opens them again."""
        await self.topology.drop_idle()

    @asynccontextmanager
    async def dropping_idle_on_timeout(self) -> AsyncIterator[None]:
        """Drop the idle connections where what runs inside fails by a timeout, and let the error pass.

        For heartbeats: no reply, unlike a refusal, may mean that the network lost every connection to the server. The
        next beat then opens new ones.
        """
        try:
            yield
        except Unavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                await self.drop_idle()
            raise

    def pubsub(self) -> PubSub:
        """Return a subscriber on a connection of its own."""
        return self.topology.pubsub()


def _command(call: Call | Command, *, by_text: bool = False) -> Command:
    if not isinstance(call, Call):
        return call
    script = call.script
    how = ("EVAL", script.text) if by_text else ("EVALSHA", script.sha)
    return (*how, *_keys(call.key), *call.arguments)


def _keys(key: str) -> tuple[Argument, ...]:
    """Return the number of keys that a script declares, and the keys.

    A partition's script takes the common prefix of its keys, and a second name in the same slot; neither is a key.
    While a cluster moves the slot, its keys are on two nodes: a script that declares one missing key would be
    redirected to the new node (ASK) and find nothing there. With two, it is refused until all have moved (TRYAGAIN).
    """
    return (2, key, f"{key}whole") if "{" in key else (1, key)
