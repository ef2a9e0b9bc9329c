"""The connections of one process to Redis: commands, scripts by their hash, subscriptions, and wake-ups.

- A write counts once it is as durable as the settings ask: on the server's disk, on a number of replicas.
- What redis-py, asyncio and uvloop raise is translated into this package's errors.
- A script may run for many partitions: in one run each 64 of them, where the server is no cluster.
- Wake-ups are new log entries, packed for each gateway that reads them. They come at most once; readers fall back to
  the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import hiredis
from pagestream.v1.records_pb2 import LogSlice, WakeUp
from redis import exceptions
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio.client import PubSub

from pagestream_streams.connection.topologies import Command, Topology, open_topology
from pagestream_streams.errors import StorageFull, Unavailable
from pagestream_streams.protocol.keys import Keyspace, Partition
from pagestream_streams.protocol.records import Argument
from pagestream_streams.scripts import Script
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import cancel, raise_if_cancelled, wait_for_event

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
        self.waits_for_durability = self._durability.is_required
        """Whether a write counts only when it is on disk or on replicas, as the settings ask."""
        self.topology = topology or open_topology(url, settings)

    @property
    def is_cluster(self) -> bool:
        """Whether some keys can be unreachable while others are served."""
        return self.topology.is_cluster

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
        if not self.waits_for_durability:
            return await self.run(script, key, *arguments)
        try:
            return await self._evaluate_together(script, key, arguments)
        except Unavailable as error:
            if not script.repeat or not isinstance(error.__cause__, exceptions.ConnectionError):
                raise
        return await self._evaluate_together(script, key, arguments)

    async def run_each_acknowledged(self, calls: Sequence[Call], limit_s: float | None = None) -> list[Any]:
        """Run scripts as `run_each`, each with the wait of `run_acknowledged`, for which `limit_s` does not count."""
        if not self.waits_for_durability:
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
        if not self.waits_for_durability:
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

    async def drop_idle_after(self, error: Unavailable) -> None:
        """Drop the idle connections where a heartbeat has failed by a timeout.

        No reply, unlike a refusal, may mean that the network lost every connection to the server. The next beat then
        opens new ones.
        """
        if isinstance(error.__cause__, TimeoutError):
            await self.drop_idle()

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


_TOUCH = "redis.call('PERSIST', KEYS[1]) return redis.call('SET', KEYS[1], '1', 'PX', 60000)"
"""A write that always reaches the replicas and the append-only file, and expires.

Redis refuses no write of a script once it has written: PERSIST needs no memory, so SET is let through when it is full.
"""


@dataclass(frozen=True)
class Durability:
    """What each write waits for; nothing where neither disk nor replicas are asked for."""

    replicas: int
    on_disk: bool
    timeout_ms: int

    @classmethod
    def of(cls, settings: StreamsSettings) -> Durability:
        """Take wait_replicas, wait_fsync and wait_timeout_ms."""
        return cls(settings.wait_replicas, settings.wait_fsync, settings.wait_timeout_ms)

    @property
    def is_required(self) -> bool:
        """Whether writes wait at all."""
        return self.replicas > 0 or self.on_disk

    def commands(self, prefix: str) -> Sequence[Sequence[Argument]]:
        """Return a write and the waits for it, to be sent after a command on the command's connection.

        WAIT counts the writes of its own connection, and a repeated append or a read has none: hence the write.
        Replicas and the append-only file keep the order: once they have it, they have all that the command saw.
        """
        commands: list[Sequence[Argument]] = [("EVAL", _TOUCH, 1, f"{prefix}waited")]
        if self.replicas:
            commands.append(("WAIT", self.replicas, self.timeout_ms))
        if self.on_disk:
            # After WAIT, since it asks the replicas at once what their disks have. A replica is asked when it has
            # received the write and has not synced it, and then says more only once a second.
            commands.append(("WAITAOF", 1, self.replicas, self.timeout_ms))
        return commands

    def check(self, replies: Sequence[Any]) -> None:
        """Raise Unavailable where the replies to `commands` show less than was asked for."""
        touched, *_, reached = replies
        if isinstance(touched, Exception):
            raise touched
        if isinstance(reached, exceptions.ResponseError) and "unknown command" in str(reached):
            raise Unavailable("wait_fsync needs WAITAOF, which Redis and Valkey have from 7.2 on; unset it, or update")
        if isinstance(reached, exceptions.ResponseError):
            raise Unavailable(f"Redis can't wait for what wait_fsync and wait_replicas ask: {reached}")
        if isinstance(reached, Exception):
            raise reached
        disks, replicas = reached if self.on_disk else (1, reached)
        if disks < 1 or replicas < self.replicas:
            wanted = [*(["its own disk"] if self.on_disk else []), f"{self.replicas} replicas"]
            raise Unavailable(
                f"a write did not reach {' and '.join(wanted)} within {self.timeout_ms} ms "
                f"(wait_fsync, wait_replicas, wait_timeout_ms); it reached {replicas} replicas"
            )


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


_PARTITIONS_A_RUN = 64  # 0.6 to 1.4 ms of Redis for beats and sweeps
_CALLS_AT_ONCE = 128  # 4 ms of the caller


async def run_on_each(
    connection: Connection,
    script: Script,
    partitions: Sequence[Partition],
    arguments: Sequence[Argument],
    limit_s: float | None = None,
) -> list[Any]:
    """Run a script for many partitions; Unavailable in place of the reply of each where it can't run.

    A cluster gets one run for each partition, any other server one for _PARTITIONS_A_RUN of them, which costs the
    caller a tenth. `limit_s`: seconds after which a silent server counts as unreachable.
    """
    if len(arguments) != script.num_arguments:
        raise ValueError(f"{script.name}: expected {script.num_arguments} arguments, got {len(arguments)}")
    prefixes = [where.prefix for where in partitions]
    size = 1 if connection.is_cluster else _PARTITIONS_A_RUN
    groups = [prefixes[first : first + size] for first in range(0, len(prefixes), size)]
    calls = [Call(script, group[0], (*arguments, *group[1:])) for group in groups]
    # In parts, so that no work on hundreds of commands holds up the event loop.
    parts = [calls[first : first + _CALLS_AT_ONCE] for first in range(0, len(calls), _CALLS_AT_ONCE)]
    found = await asyncio.gather(*(_replies(connection, part, limit_s) for part in parts))
    replies: list[Any] = []
    for group, reply in zip(groups, (reply for part in found for reply in part), strict=True):
        replies += [reply] * len(group) if isinstance(reply, Unavailable) else reply
    return translated_replies(replies)


async def _replies(connection: Connection, calls: Sequence[Call], limit_s: float | None) -> Sequence[Any]:
    try:
        return await connection.run_each(calls, limit_s)
    except Unavailable as error:
        return [error] * len(calls)


_log = logging.getLogger(__name__)

_PING_AFTER_S = 5.0  # silence after which a PING is sent
_PAUSE_S = 0.2  # between two attempts to connect


class Subscription:
    """Passes each message to `on_message`, and calls `on_gap` after each (re)connection: messages may be lost."""

    def __init__(
        self,
        connection: Connection,
        channels: Sequence[str],
        on_message: Callable[[bytes], Iterable[None] | None],
        on_gap: Callable[[], None],
    ) -> None:
        """Create it stopped.

        Args:
            on_message: called with each message, must not block; where it yields, other tasks get their turn.
            on_gap: called where messages may have been lost; must not block.
        """
        self._connection = connection
        self._channels = channels
        self._on_message = on_message
        self._on_gap = on_gap
        self._task: asyncio.Task[None] | None = None
        self._subscribed = asyncio.Event()

    def start(self) -> None:
        """Connect and subscribe in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"subscription {' '.join(self._channels)}")

    async def stop(self) -> None:
        """Close the connection."""
        if self._task is None:
            return
        task, self._task = self._task, None
        await cancel(task)

    async def subscribed(self, timeout_s: float) -> bool:
        """Wait until it is subscribed, at most `timeout_s` seconds; return whether it is."""
        return await wait_for_event(self._subscribed, timeout_s)

    async def _run(self) -> None:
        while True:
            try:
                await self._follow_once()
            except (exceptions.RedisError, OSError, TimeoutError) as error:
                _log.info("%s: %s", self._channels, error)
            except asyncio.CancelledError:
                raise_if_cancelled()
                _log.exception("%s: cancelled from inside; it connects again", self._channels)
            except Exception:  # noqa: BLE001 - whatever it is, wake-ups are needed
                _log.exception("%s: the subscription has failed; it connects again", self._channels)
            await asyncio.sleep(_PAUSE_S)

    async def _follow_once(self) -> None:
        """Follow by one connection, until it is lost."""
        pubsub = self._connection.pubsub()
        try:
            with closed_transport_as_connection_error():
                await self._follow(pubsub)
        finally:
            self._subscribed.clear()
            await _close(pubsub)

    async def _follow(self, pubsub: PubSub) -> None:
        loop = asyncio.get_running_loop()
        await pubsub.subscribe(*self._channels)
        while not self._subscribed.is_set():
            message = await pubsub.get_message(timeout=_PING_AFTER_S)
            if message is None:
                raise TimeoutError("no answer to a subscription")
            if message["type"] == "subscribe":
                self._subscribed.set()
                self._on_gap()
        with _Messages(pubsub, self._passed_on) as messages:
            while True:
                silent_s = loop.time() - messages.heard_at
                if silent_s >= 2 * _PING_AFTER_S:
                    raise TimeoutError("no answer to a ping")
                if silent_s >= _PING_AFTER_S:
                    messages.ping()
                limit_s = _PING_AFTER_S if silent_s < _PING_AFTER_S else 2 * _PING_AFTER_S
                await asyncio.wait([messages.lost], timeout=limit_s - silent_s)
                if messages.lost.done():
                    messages.lost.result()

    def _passed_on(self, message: bytes) -> Iterator[None]:
        """Pass a message on; yield where other tasks are to get their turn."""
        try:
            yield from self._on_message(message) or ()
        except Exception:  # noqa: BLE001 - a malformed message must not end the subscription
            _log.exception("%s: a message can't be read; it is treated as lost", self._channels)
            self._on_gap()


class _Messages(asyncio.Protocol):
    """Takes the connection of a subscriber over from redis-py, and passes its messages on as they come.

    redis-py's own way, of timers, coroutines and a switch of tasks, took half of what a lone stream costs its
    gateway. Where a consumer has yielded, other tasks get their turn, and nothing more is read until it is done.
    """

    def __init__(self, pubsub: PubSub, on_message: Callable[[bytes], Iterator[None]]) -> None:
        connection: Any = pubsub.connection  # redis-py says that it is None
        if connection is None or not connection.is_connected:
            raise exceptions.ConnectionError("the subscriber's connection was lost before its first message")
        self._reader: hiredis.Reader = connection._parser._reader  # which may have a part of a message
        self._stream = connection._reader
        self._transport: asyncio.Transport = connection._writer.transport
        self._before = cast(asyncio.Protocol, self._transport.get_protocol())
        self._loop = asyncio.get_running_loop()
        self._rounds = self._messages(on_message)
        self._is_passing = False
        """Whether a consumer has yielded."""
        self.heard_at = self._loop.time()
        """When the server has last sent anything."""
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Done where the connection is lost; its result is the error."""

    def __enter__(self) -> Self:
        """Take the connection over, with what has been read of it."""
        self._transport.set_protocol(self)
        unread, self._stream._buffer = self._stream._buffer, bytearray()
        if self._transport.is_closing() or self._stream.at_eof():
            self._lose(exceptions.ConnectionError("the connection was lost before its first message"))
        else:
            self._transport.resume_reading()  # redis-py's stream may have paused it
            self.data_received(bytes(unread))
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back, to be closed."""
        if not self.lost.cancel() and not self.lost.cancelled():
            self.lost.exception()  # else asyncio logs it as one that nobody has seen
        self._rounds.close()
        self._transport.set_protocol(self._before)

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._transport.write(b"*1\r\n$4\r\nPING\r\n")

    def data_received(self, data: bytes) -> None:
        """Pass on what is complete."""
        self.heard_at = self._loop.time()
        self._reader.feed(data)
        if self._is_passing:
            self._transport.pause_reading()
        else:
            self._pass_on()

    def eof_received(self) -> None:
        """Let the transport close itself."""
        self._before.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """End with the error."""
        self._before.connection_lost(error)
        self._lose(exceptions.ConnectionError(f"the connection was lost: {error or 'the server has closed it'}"))

    def _pass_on(self) -> None:
        if self.lost.done():
            return
        was_passing = self._is_passing
        try:
            self._is_passing = next(self._rounds)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the subscription raises it
            self._lose(error)
            return
        if self._is_passing:
            self._loop.call_soon(self._pass_on)
        elif was_passing and not self._transport.is_reading():
            self._transport.resume_reading()

    def _messages(self, on_message: Callable[[bytes], Iterator[None]]) -> Generator[bool, None, None]:
        """Pass messages on; yield True where a consumer has yielded, and False where none is complete."""
        while True:
            reply = self._reader.gets()
            if reply is NOT_ENOUGH_DATA:
                yield False
            elif isinstance(reply, Exception):
                raise reply
            elif isinstance(reply, list) and reply[0] == b"message":
                for _ in on_message(reply[2]):
                    yield True

    def _lose(self, error: BaseException) -> None:
        if not self.lost.done():
            self.lost.set_exception(error)


async def _close(pubsub: PubSub) -> None:
    close: Callable[[], Awaitable[None]] = pubsub.aclose
    with suppress(exceptions.RedisError, OSError, TimeoutError), closed_transport_as_connection_error():
        await close()


_MOST_WAITING_BYTES = 4 * 1024 * 1024  # for one gateway while its last message is in flight


def gateways_of(readers: bytes) -> list[str]:
    """Return the gateway ids in a request's readers, as the scripts return them."""
    return readers.decode().split()


def wake_up_message(log_slice: LogSlice) -> bytes:
    """Serialise a wake-up of one slice. Concatenated messages are one message with all slices."""
    return WakeUp(slices=[log_slice]).SerializeToString()


async def publish_wake_ups(connection: Connection, wake_ups: Iterable[tuple[bytes, bytes]]) -> None:
    """Send wake-ups (see `wake_up_message`) to their readers, one message to each gateway.

    A slice without entries makes readers read the log. A lost message costs them settings.poll_ms, so failures are
    logged only.
    """
    await _publish(connection, _by_gateway(wake_ups))


class WakeUpSender:
    """Sends wake-ups in the background: one message in flight for each gateway, later slices in the next one.

    For a cluster, where the node of a gateway's channel may be silent while the nodes of the logs are not.
    """

    def __init__(self, connection: Connection, limit_s: float) -> None:
        """`limit_s`: seconds after which a message in flight counts as lost."""
        self._connection = connection
        self._limit_s = limit_s
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, bytes] = {}

    @property
    def is_sending(self) -> bool:
        """Whether any message is in flight."""
        return bool(self._sending)

    def send(self, wake_ups: Iterable[tuple[bytes, bytes]]) -> None:
        """Queue wake-ups (see `wake_up_message`) for their readers. Beyond _MOST_WAITING_BYTES, they are dropped."""
        for gateway, message in _by_gateway(wake_ups).items():
            if gateway not in self._sending:
                self._sending[gateway] = asyncio.create_task(self._send(gateway, message), name="wake-ups")
                continue
            waiting = self._waiting.get(gateway, b"")
            if len(waiting) + len(message) <= _MOST_WAITING_BYTES:
                self._waiting[gateway] = waiting + message

    async def stop(self) -> None:
        """Cancel the messages in flight."""
        for task in list(self._sending.values()):
            await cancel(task)

    async def _send(self, gateway: str, message: bytes) -> None:
        try:
            while message:
                await _publish(self._connection, {gateway: message}, self._limit_s)
                message = self._waiting.pop(gateway, b"")
        finally:
            self._waiting.pop(gateway, None)
            del self._sending[gateway]


def _by_gateway(wake_ups: Iterable[tuple[bytes, bytes]]) -> dict[str, bytes]:
    by_readers: defaultdict[bytes, list[bytes]] = defaultdict(list)  # first, since most requests have the same ones
    for message, readers in wake_ups:
        by_readers[readers].append(message)
    messages: defaultdict[str, list[bytes]] = defaultdict(list)
    for readers, found in by_readers.items():
        for gateway in gateways_of(readers):
            messages[gateway] += found
    return {gateway: b"".join(found) for gateway, found in messages.items()}


async def _publish(connection: Connection, messages: dict[str, bytes], limit_s: float | None = None) -> None:
    commands = [("PUBLISH", connection.keyspace.wake_ups(gateway), message) for gateway, message in messages.items()]
    try:
        await connection.pipeline(commands, limit_s)
    except Unavailable as error:
        _log.info("wake-ups were not sent: %s", error)
