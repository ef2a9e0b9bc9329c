"""Redis servers behind an address: one server, the master that Sentinels name, or a cluster.

A cluster's commands go to the node that has their key, and follow slots that move.

redis-py's asyncio connections are `Light` here: they pack commands by hiredis, as its synchronous ones do, and write
without a task and a timer where the write can't wait. Commands that tasks send at the same time share a round trip: one
connection, one write, one wake-up of this process. A script's run with 32 arguments takes redis-py 8.1 118 us of
processor time, a light connection 85 (`tests/benchmarks/redis_commands.py`); of 64 at once each takes 131, 98, and
gathered 48.
"""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableSequence, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote
from weakref import WeakSet

from pagestream_telemetry.addresses import split_address
from redis import exceptions
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.connection import Connection as Socket
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import DataError

from pagestream_streams.protocol.records import Argument
from pagestream_streams.settings import SCHEMES, StreamsSettings, split_url
from pagestream_streams.tasks import cancel

_TLS_OPTIONS = ("ssl_ca_certs", "ssl_ca_data", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_SENTINEL_PORT, _REDIS_PORT = 26379, 6379


def open_topology(url: str, settings: StreamsSettings) -> Topology:
    """Create the topology that an address names, without connecting. ValueError for a malformed address.

    Forms: redis://[user:password@]host[:port][/db], unix://path, redis+sentinel://[user:password@]host[:port],.../
    service[/db], redis+cluster://[user:password@]host[:port],... With rediss the connections are TLS; its options are
    redis-py's, behind a question mark: ssl_ca_certs (a file), ssl_ca_data (PEM), ssl_certfile, ssl_keyfile,
    ssl_cert_reqs, ssl_check_hostname.
    Sentinels are asked without a password unless sentinel_username and sentinel_password give one.
    """
    if not url.startswith(SCHEMES):
        shown = url.partition("://")[0]
        raise ValueError(
            f"expected a Redis address that begins with {', '.join(SCHEMES)}; got one that begins with {shown!r}"
        )
    kind = url.partition("://")[0].rpartition("+")[2]
    if kind == "sentinel":
        return _sentinel(url, settings)
    if kind == "cluster":
        return _cluster(url, settings)
    # A bound that is never reached: SingleServer admits fewer commands, and waits cheaper than redis-py's pool.
    pool = ConnectionPool.from_url(url, max_connections=4 * settings.max_connections, **_limits(settings))
    pool.connection_class = light(pool.connection_class)
    return SingleServer(Redis(connection_pool=pool), settings.max_connections)


class SingleServer:
    """One server, or the master that Sentinels name."""

    is_cluster = False

    def __init__(self, redis: Redis, max_connections: int, others: Sequence[Redis] = ()) -> None:
        """More commands at once than `max_connections` wait for their turn. `others` are closed with it."""
        self._redis = redis
        self._others = others
        self._turns = asyncio.Semaphore(max_connections)
        self._gathering = Gathering(self._turns, max_connections, self._run_one, self._pipeline)

    async def execute(self, *command: Argument) -> Any:
        return await self._gathering.run(command)

    async def execute_on_each(self, *command: Argument) -> list[Any]:
        return await self.pipeline([command])

    async def pipeline(self, commands: Sequence[Command], limit_s: float | None = None) -> list[Any]:
        try:
            async with asyncio.timeout(limit_s), self._turns:
                return await self._pipeline(commands)
        except TimeoutError:
            if limit_s is None:
                raise
            return [TimeoutError(f"no answer within {limit_s:g} s")] * len(commands)

    async def _run_one(self, *command: Argument) -> Any:
        [reply] = await self._pipeline([command])
        if isinstance(reply, exceptions.ResponseError):
            raise reply
        return reply

    async def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """As redis-py's pipeline, without its lock, records and events, which take longer than all else."""
        pool = self._redis.connection_pool
        connection: Any = pool.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            await pool.ensure_connection(connection)
            await connection.send_packed_command(connection.pack_commands(commands))
            replies: list[Any] = []
            for command in commands:
                try:
                    replies.append(await self._redis.parse_response(connection, str(command[0])))
                except exceptions.ResponseError as error:
                    replies.append(error)
            return replies
        except BaseException:
            await connection.disconnect(nowait=True)  # replies that are still to come must not answer the next command
            raise
        finally:
            pool._in_use_connections.discard(connection)
            pool._available_connections.append(connection)

    async def pipeline_to(self, key: str, commands: Sequence[Command]) -> list[Any]:
        return await self.pipeline(commands)

    def pubsub(self) -> PubSub:
        return self._redis.pubsub()

    async def drop_idle(self) -> None:
        await close_idle(self._redis.connection_pool._available_connections)

    async def close(self) -> None:
        await self._gathering.stop()
        for each in (self._redis, *self._others):
            await each.aclose()
            await each.connection_pool.disconnect()


class _Address:
    """An address of several hosts, in its parts."""

    def __init__(self, url: str, default_port: int) -> None:
        parts = split_url(url)
        user, _, password = parts.login.partition(":")
        self.tls = parts.scheme.startswith("rediss")
        self.path = parts.path.strip("/")
        self.hosts = [split_address(each, default_port) for each in parts.hosts]
        self.credentials: dict[str, Any] = {
            name: unquote(value) for name, value in (("username", user), ("password", password)) if value
        }
        self.options: dict[str, Any] = {}
        self.sentinel_credentials: dict[str, Any] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in ("sentinel_username", "sentinel_password"):
                self.sentinel_credentials[name.removeprefix("sentinel_")] = value
            elif name in _TLS_OPTIONS and self.tls:
                self.options[name] = value.lower() in ("true", "1", "yes") if name == "ssl_check_hostname" else value
            else:
                raise ValueError(f"unknown option {name!r} in the address; with rediss: {', '.join(_TLS_OPTIONS)}")


def _sentinel(url: str, settings: StreamsSettings) -> Topology:
    address = _Address(url, _SENTINEL_PORT)
    service, _, db = address.path.partition("/")
    if not service or (db and not db.isdecimal()):
        raise ValueError("expected redis+sentinel://host:port,host:port/<service>[/<db>]")
    tls = {"ssl": True, **address.options} if address.tls else {}
    limits = _limits(settings)
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        address.hosts, sentinel_kwargs={**limits, **tls, **address.sentinel_credentials}
    )
    redis: Redis = sentinel.master_for(
        service,
        db=int(db or 0),
        max_connections=4 * settings.max_connections,  # not reached: SingleServer admits fewer commands
        **limits,
        **tls,
        **address.credentials,
    )
    redis.connection_pool.connection_class = light(redis.connection_pool.connection_class)
    return SingleServer(redis, settings.max_connections, sentinel.sentinels)


def _cluster(url: str, settings: StreamsSettings) -> Topology:
    address = _Address(url, _REDIS_PORT)
    if address.path:
        raise ValueError(f"a cluster has one database and no service: remove {address.path!r} after the hosts")
    cluster = RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
        # A node's pool raises when it is exhausted: ClusterTopology admits fewer commands than it has connections.
        max_connections=2 * settings.max_connections,
        require_full_coverage=False,
        ssl=address.tls,
        **_limits(settings),
        **address.credentials,
        **address.options,
    )
    connections = WeakSet[AbstractConnection]()
    connection_class = light(cluster.connection_kwargs["connection_class"], connections)
    cluster.connection_kwargs["connection_class"] = connection_class  # of nodes that are found later
    for node in cluster.startup_nodes:
        node.connection_class = connection_class
    return ClusterTopology(cluster, connections, settings.max_connections)


def _limits(settings: StreamsSettings) -> Mapping[str, Any]:
    """Return every connection's options. redis-py's own retries are off: scripts say whether they may be repeated."""
    return {
        "socket_timeout": settings.command_timeout_s,
        "socket_connect_timeout": settings.command_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }


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


_MOST_REDIRECTIONS = 5
_REFRESH_PAUSE_S = 0.2
# Index of a command's key where it isn't 1.
_KEY_AT = {"EVAL": 3, "EVALSHA": 3, "MEMORY": 2, "XGROUP": 2}
_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


class ClusterTopology:
    """A cluster. Each script's keys share a hash tag, so one node has them all.

    redis-py keeps the nodes, their slots and connections; commands are sent here. redis-py's own sending closes every
    node's connections under the commands that wait on them, sends ASKING on another connection than its command, sleeps
    before it reports an error, and fails a whole pipeline for one node's error.
    """

    is_cluster = True

    def __init__(self, cluster: RedisCluster, connections: WeakSet[AbstractConnection], max_commands: int) -> None:
        """`connections`: all that the cluster's nodes make, those too that have left it.

        More commands or pipelines at once than `max_commands` wait. A node has a connection for each.
        """
        self.cluster = cluster
        self._connections = connections
        self._turns = asyncio.Semaphore(max_commands)
        self._refreshed_at = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def execute(self, *command: Argument) -> Any:
        """Run one command; see Topology."""
        # Not gathered with others' commands: one silent node must not hold up what other nodes answer.
        [reply] = await self.pipeline([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def execute_on_each(self, *command: Argument) -> list[Any]:
        """Run a command without a key on each master; see Topology."""
        async with self._turns:
            await self.cluster.initialize()
            batches = (self._batch(node, [command]) for node in self.cluster.get_primaries())
            return [reply for replies in await asyncio.gather(*batches) for reply in replies]

    async def pipeline(self, commands: Sequence[Command], limit_s: float | None = None) -> list[Any]:
        """Run commands in one round trip to each node; see Topology.

        A lost connection is the reply of its commands, too. A node that is silent for longer than the limit is left.
        """
        until = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(until):
                await self._turns.acquire()
        except TimeoutError as error:
            return [error] * len(commands)
        try:
            await self.cluster.initialize()
            replies: list[Any] = [None] * len(commands)
            places: defaultdict[ClusterNode, list[int]] = defaultdict(list)
            for place, command in enumerate(commands):
                try:
                    places[self.node(_key(command))].append(place)
                except exceptions.RedisClusterException as error:
                    replies[place] = error
            batches = (self._batch(node, [commands[place] for place in mine], limit_s) for node, mine in places.items())
            for mine, found in zip(places.values(), await asyncio.gather(*batches), strict=True):
                for place, reply in zip(mine, found, strict=True):
                    replies[place] = await self._redirected(commands[place], reply, until)
            await self._learn(replies)
            return replies
        finally:
            self._turns.release()

    async def pipeline_to(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """Run commands on one connection to the node that has `key`; see Topology."""
        async with self._turns:
            await self.cluster.initialize()
            replies = await self._batch(self.node(key), commands)
            await self._learn(replies)
            return replies

    def pubsub(self) -> PubSub:
        """Return a subscriber on a connection of its own."""
        pubsub: PubSub = self.cluster.pubsub()
        return pubsub

    async def drop_idle(self) -> None:
        """Close the connections on which no command waits; the next command opens them again."""
        await asyncio.gather(*(close_idle(node._free) for node in self.cluster.get_nodes()))

    async def close(self) -> None:
        """Close every connection.

        redis-py leaves those that were opened since it last called the cluster closed, and some of nodes that have
        left it.
        """
        self._is_closed = True
        if self._refreshing is not None:
            await cancel(self._refreshing)
        try:
            await self.cluster.aclose()
        finally:
            left = [each.disconnect(nowait=True) for each in list(self._connections) if each.is_connected]
            await asyncio.gather(*left, return_exceptions=True)

    def node(self, key: Argument) -> ClusterNode:
        """Return the node that has a key. redis-py's SlotNotCoveredError where no node has its slot."""
        node = self.cluster.get_node_from_key(str(key))
        if node is None:
            raise exceptions.SlotNotCoveredError(f"no node has the slot of {key!r}")
        return node

    async def _batch(self, node: ClusterNode, commands: Sequence[Command], limit_s: float | None = None) -> list[Any]:
        """Return each command's reply or error; all have one where the connection is lost."""
        try:
            async with asyncio.timeout(limit_s):
                socket = node.acquire_connection()
                try:
                    return await _replies(node, socket, commands)
                finally:
                    if self.cluster.get_node(node_name=node.name) is not node:
                        await socket.disconnect(nowait=True)  # the node has left meanwhile, and nobody closes it again
                    node.release(socket)
        except _LOST as error:
            return [error] * len(commands)

    async def _redirected(self, command: Command, reply: Any, until: float | None) -> Any:
        """Follow MOVED and ASK, and return the reply at their end. `until`: no longer than to this time of the loop."""
        for _ in range(_MOST_REDIRECTIONS):
            left_s = None if until is None else until - asyncio.get_running_loop().time()
            if left_s is not None and left_s <= 0:
                break  # it has run nowhere; sent now, it would run and its reply be lost
            if isinstance(reply, exceptions.MovedError):
                await self.cluster.nodes_manager.move_slot(reply)
                [reply] = await self._batch(self.node(_key(command)), [command], left_s)
            elif isinstance(reply, exceptions.AskError):
                node = self.cluster.get_node(host=reply.host, port=reply.port)
                if node is None:
                    return reply
                _, reply = await self._batch(node, [("ASKING",), command], left_s)
            else:
                break
        return reply

    async def _learn(self, replies: Sequence[Any]) -> None:
        """Update the slot table from MOVED replies; read it anew where a node was lost or a slot has no owner."""
        for reply in replies:
            if isinstance(reply, exceptions.MovedError):
                await self.cluster.nodes_manager.move_slot(reply)
            elif isinstance(reply, (exceptions.ClusterDownError, exceptions.SlotNotCoveredError, *_LOST)):
                self._refresh_soon()
                return

    def _refresh_soon(self) -> None:
        """Read the slot table in the background, at most every _REFRESH_PAUSE_S seconds: nodes need time to agree.

        In the background because the first node that is asked may hang.
        """
        now = asyncio.get_running_loop().time()
        is_refreshing = self._refreshing is not None and not self._refreshing.done()
        if not self._is_closed and not is_refreshing and now - self._refreshed_at >= _REFRESH_PAUSE_S:
            self._refreshed_at = now
            self._refreshing = asyncio.create_task(self._refresh(), name="refresh slots")

    async def _refresh(self) -> None:
        """Read the slot table, without closing connections on which commands wait."""
        with suppress(exceptions.RedisError, exceptions.RedisClusterException, OSError):
            await self.cluster.nodes_manager.initialize()


def _key(command: Command) -> Argument:
    """Return the command's key; "" for one without."""
    if command[0] == "XREADGROUP":
        return command[command.index("STREAMS") + 1]
    place = _KEY_AT.get(str(command[0]), 1)
    return command[place] if len(command) > place else ""


async def _replies(node: ClusterNode, socket: Socket, commands: Sequence[Command]) -> list[Any]:
    try:
        await socket.send_packed_command(socket.pack_commands(commands))
        replies: list[Any] = []
        for command in commands:
            try:
                replies.append(await node.parse_response(socket, str(command[0])))
            except exceptions.ResponseError as error:
                replies.append(error)
        return replies
    except AttributeError as error:
        # A node that has left the cluster is closed, perhaps while a command opens its connection.
        await socket.disconnect(nowait=True)
        raise exceptions.ConnectionError("the connection was closed while it was being opened") from error
    except BaseException:
        # Replies that are still to come must not answer the next command.
        await socket.disconnect(nowait=True)
        raise


_MOST_TOGETHER = 64  # commands of a round trip
_LARGE_BYTES = 1 << 16  # of a round trip's arguments: whatever comes then has another one
_MOST_TRIPS = 8  # beside each other; what comes meanwhile gathers
_SLOW_S = 0.25
"""After which a round trip does not count among these: its connection may be dead, and others not."""

_CLOSED = "the connections are closed"

_Reply = asyncio.Future[Any]


class Gathering:
    """Runs commands: one alone at once, those that come meanwhile together, once a turn of the event loop.

    Who is cancelled no longer waits, and what has not been sent by then never is; a round trip for which nobody waits
    any more ends, with its connection. A lost or silent connection is an error for each command of its round trip.
    """

    def __init__(
        self,
        turns: asyncio.Semaphore,
        num_turns: int,
        run_one: Callable[..., Awaitable[Any]],
        run_many: Callable[[Sequence[Command]], Awaitable[Sequence[Any]]],
    ) -> None:
        """Create it.

        Args:
            turns: one is taken for each round trip.
            num_turns: as many as there are; half of them at most are taken, however slow round trips are.
            run_many: runs commands in one round trip; returns a reply or an exception for each.
        """
        self._turns = turns
        self._most_trips = max(_MOST_TRIPS, num_turns // 2)
        self._run_one = run_one
        self._run_many = run_many
        self._is_one_sent = False
        self._is_closed = False
        self._waiting: dict[_Reply, Command] = {}
        self._trips: dict[asyncio.Task[None], float] = {}
        """With when they began."""
        self._trip_of: dict[_Reply, asyncio.Task[None]] = {}
        self._looks_again: asyncio.TimerHandle | None = None

    async def run(self, command: Command) -> Any:
        """Return a command's reply, or raise its error."""
        if self._is_closed:
            raise LostConnection(_CLOSED)
        if not self._is_one_sent:
            self._is_one_sent = True
            try:
                async with self._turns:
                    return await self._run_one(*command)
            finally:
                self._is_one_sent = False
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        reply: _Reply = loop.create_future()
        self._waiting[reply] = command
        try:
            return await reply
        finally:
            self._waiting.pop(reply, None)
            self._leave(reply)

    async def stop(self) -> None:
        """End the round trips in flight: their commands, and those that wait, are lost. It takes no more."""
        self._is_closed = True
        if self._looks_again is not None:
            self._looks_again.cancel()
        _fail(self._waiting, LostConnection(_CLOSED))
        for trip in list(self._trips):
            await cancel(trip)

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and len(self._trips) < self._most_trips and not self._is_closed:
            quick = [began for began in self._trips.values() if now - began < _SLOW_S]
            if len(quick) >= _MOST_TRIPS:
                if self._looks_again is None:
                    self._looks_again = loop.call_at(min(quick) + _SLOW_S, self._look_again)
                return
            together = self._next_together()
            trip = asyncio.create_task(self._take_turn(together))
            self._trips[trip] = now
            self._trip_of.update(dict.fromkeys(together, trip))
            trip.add_done_callback(partial(self._ended, together))

    def _look_again(self) -> None:
        self._looks_again = None
        self._send()

    def _next_together(self) -> dict[_Reply, Command]:
        """Return what goes in the next round trip, which waits no longer."""
        together, num_bytes = dict[_Reply, Command](), 0
        for reply, command in islice(self._waiting.items(), _MOST_TOGETHER):
            num_bytes += sum(len(each) for each in command if isinstance(each, bytes | str))
            if together and num_bytes > _LARGE_BYTES:
                break
            together[reply] = command
        for reply in together:
            del self._waiting[reply]
        return together

    def _leave(self, reply: _Reply) -> None:
        """End the round trip of a reply that is no longer waited for, unless another one's still is."""
        trip = self._trip_of.pop(reply, None)
        if trip is not None and reply.cancelled() and trip not in self._trip_of.values():
            trip.cancel()

    def _ended(self, together: Iterable[_Reply], trip: asyncio.Task[None]) -> None:
        del self._trips[trip]
        for reply in together:
            self._trip_of.pop(reply, None)
        if trip.cancelled():
            _fail(together, LostConnection(_CLOSED))
        elif (error := trip.exception()) is not None:
            _fail(together, error)
        self._send()

    async def _take_turn(self, together: dict[_Reply, Command]) -> None:
        async with self._turns:
            wanted = {reply: command for reply, command in together.items() if not reply.done()}
            if not wanted:
                return
            answers = await self._run_together(list(wanted.values()))
        for reply, answer in zip(wanted, answers, strict=True):
            if reply.done():  # cancelled
                continue
            if isinstance(answer, Exception):
                own = copy.copy(answer)  # with a traceback of its own
                own.__cause__ = answer
                reply.set_exception(own)
            else:
                reply.set_result(answer)

    async def _run_together(self, commands: Sequence[Command]) -> Sequence[Any]:
        if len(commands) == 1:
            return [await self._run_alone(commands[0])]
        try:
            return await self._run_many(commands)
        except (DataError, UnicodeError):  # one of them can't be packed, and nothing was sent
            return [await self._run_alone(command) for command in commands]
        except Exception as error:  # noqa: BLE001 - it is raised where the commands are awaited
            return [error] * len(commands)

    async def _run_alone(self, command: Command) -> Any:
        try:
            return await self._run_one(*command)
        except Exception as error:  # noqa: BLE001 - likewise
            return error


def _fail(replies: Iterable[_Reply], error: BaseException) -> None:
    """Raise the error where a reply is still awaited."""
    for reply in replies:
        if not reply.done():
            reply.set_exception(error)


_WAITS_ABOVE_BYTES = 1 << 16
"""asyncio's high-water mark: a write that leaves less in the transport's buffer never waits."""

_serializer = HiredisRespSerializer()

_Class = TypeVar("_Class", bound=type[AbstractConnection])


class Light(AbstractConnection):
    """Mixed into one of redis-py's classes."""

    def pack_command(self, *args: Any) -> list[bytes]:
        """Return a command in Redis' protocol. DataError for arguments of other types."""
        try:
            return _serializer.pack(*args)  # type: ignore[no-any-return]
        except DataError:  # as for an enumeration's number, which redis-py takes
            return super().pack_command(*args)

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """Write a command. ConnectionError, TimeoutError."""
        if self._writer is not None and self._writer.is_closing():
            # `writelines` of Python 3.12 and later fails with AttributeError on a transport that is closed.
            await self.disconnect(nowait=True)
            raise LostConnection("the server has closed the connection")
        writer = self._writer if not self.health_check_interval else None
        if writer is not None and not isinstance(command, bytes | str) and not writer.is_closing():
            # As one: `writelines` of Python 3.13 doesn't have the next `drain` wait for a full buffer.
            writer.write(b"".join(command))
            if not writer.is_closing() and writer.transport.get_write_buffer_size() <= _WAITS_ABOVE_BYTES:
                return
            command = ()  # what is left is redis-py's: it waits, with the socket's limit, and reports what is lost
        await super().send_packed_command(command, check_health)


def light(connection_class: _Class, made: WeakSet[AbstractConnection] | None = None) -> _Class:
    """Return one of redis-py's classes of connections with the same behaviour and less work.

    `made`: gets each connection, for a client that can't name them all when it closes.
    """

    def note(connection: AbstractConnection, *arguments: Any, **options: Any) -> None:
        connection_class.__init__(connection, *arguments, **options)
        if made is not None:
            made.add(connection)

    return type(f"Light{connection_class.__name__}", (Light, connection_class), {"__init__": note})  # type: ignore[return-value]
