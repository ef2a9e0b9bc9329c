"""Connections without a server: what goes together, what is lost alone, and which URL means which topology."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
from pagestream.v1.records_pb2 import LogSlice
from pagestream_streams import StreamsSettings, Unavailable
from pagestream_streams.connection import ClusterTopology, Connection, open_topology
from pagestream_streams.connection.connection import (
    Durability,
    WakeUpSender,
    closed_transport_as_connection_error,
    wake_up_message,
)
from pagestream_streams.connection.topologies import Gathering, Light, light
from pagestream_streams.protocol import Keyspace
from redis import exceptions
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.connection import Connection as RedisConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import ResponseError
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually


class Server:
    """Answers a command by its last word when it may; "wrong" by an error."""

    def __init__(self) -> None:
        self.sent: list[list[Sequence[Any]]] = []
        self.may_answer = asyncio.Event()
        self.is_lost = False
        self.turns = asyncio.Semaphore(100)
        self.gathering = Gathering(self.turns, 100, self.run_one, self.run_many)

    async def run_one(self, *command: Any) -> Any:
        [reply] = await self.run_many([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def run_many(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        for each in commands:
            str(each[-1]).encode()  # as packing does, before anything is sent
        self.sent.append(list(commands))
        await self.may_answer.wait()
        if self.is_lost:
            raise LostConnection("reset")
        return [ResponseError("a wrong command") if each[-1] == "wrong" else each[-1] for each in commands]

    def begin(self, *words: Any) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(self.gathering.run(("ECHO", word))) for word in words]


@pytest.fixture
async def server() -> Server:
    return Server()


async def until_sent(server: Server, count: int) -> None:
    def is_sent() -> bool:
        return sum(map(len, server.sent)) == count

    await eventually(is_sent)


async def test_one_alone_is_sent_at_once_and_what_comes_meanwhile_together(server: Server) -> None:
    tasks = server.begin(*range(6))
    await until_sent(server, 6)
    assert [len(each) for each in server.sent] == [1, 5]
    server.may_answer.set()
    assert await asyncio.gather(*tasks) == list(range(6))
    assert await server.gathering.run(("ECHO", "later")) == "later"
    assert [len(each) for each in server.sent] == [1, 5, 1], "no round of the loop for one alone"


async def test_a_rush_takes_few_round_trips_beside_each_other(server: Server) -> None:
    tasks = server.begin(*range(1000))
    await until_sent(server, 1 + 8 * 64)
    assert [len(each) for each in server.sent] == [1] + [64] * 8
    server.may_answer.set()
    assert await asyncio.gather(*tasks) == list(range(1000))
    assert all(len(each) == 64 for each in server.sent[1:-1])


async def test_an_error_is_its_commands_own(server: Server) -> None:
    server.may_answer.set()
    found = await asyncio.gather(*server.begin(0, 1, "wrong", 3), return_exceptions=True)
    assert [found[0], found[1], found[3]] == [0, 1, 3]
    assert isinstance(found[2], ResponseError)


async def test_a_command_that_can_not_be_packed_is_an_error_of_its_own(server: Server) -> None:
    server.may_answer.set()
    found = await asyncio.gather(*server.begin(0, 1, "\ud800", 3), return_exceptions=True)
    assert [found[0], found[1], found[3]] == [0, 1, 3]
    assert isinstance(found[2], UnicodeEncodeError)


async def test_a_lost_connection_is_an_error_for_each_with_its_own_traceback(server: Server) -> None:
    tasks = server.begin(*range(4))
    await until_sent(server, 4)
    server.is_lost = True
    server.may_answer.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, LostConnection) and str(each) == "reset" for each in found)
    assert len({id(each) for each in found}) == len(found)
    server.is_lost = False
    assert await server.gathering.run(("ECHO", "again")) == "again"


async def test_who_is_cancelled_takes_nobody_along(server: Server) -> None:
    tasks = server.begin(*range(4))
    await until_sent(server, 4)
    for each in (tasks[0], tasks[2]):
        each.cancel()
    await asyncio.wait(tasks, timeout=0)
    server.may_answer.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [found[1], found[3]] == [1, 3]
    assert all(isinstance(found[each], asyncio.CancelledError) for each in (0, 2))


async def test_what_was_cancelled_before_it_was_sent_never_is(server: Server) -> None:
    """A server that was silent answers again: what nobody waits for is not done now, as it never was."""
    for _ in range(99):
        await server.turns.acquire()
    hung = server.begin("hung")
    await until_sent(server, 1)
    gone = server.begin(*range(600))
    await asyncio.sleep(0.01)
    for each in gone:
        each.cancel()
    await asyncio.wait(gone)
    kept = server.begin("kept")
    server.may_answer.set()
    assert await asyncio.gather(*hung, *kept) == ["hung", "kept"]
    assert server.sent == [[("ECHO", "hung")], [("ECHO", "kept")]]


@pytest.mark.parametrize("num_turns", [1, 2, 3, 4], ids="after turn {}".format)
async def test_stopping_ends_what_waits(server: Server, num_turns: int) -> None:
    first, *others = server.begin(*range(4))
    for _ in range(num_turns):  # waiting, or in a task that has not begun, or sent
        await asyncio.sleep(0)
    await server.gathering.stop()
    async with asyncio.timeout(LIMIT_S):
        found = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(each, LostConnection) for each in found)
    server.may_answer.set()
    assert await first == 0
    with pytest.raises(LostConnection):
        await server.gathering.run(("ECHO", "late"))


async def test_round_trips_that_hang_do_not_hold_others_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of connections that the network has lost; a new one answers."""
    monkeypatch.setattr("pagestream_streams.connection.topologies._SLOW_S", 0.05)
    hung = server.begin(*range(1 + 8 * 64))
    await until_sent(server, len(hung))
    late = server.begin("late")
    await until_sent(server, len(hung) + 1)
    assert server.sent[-1] == [("ECHO", "late")]
    server.may_answer.set()
    assert await asyncio.gather(*late) == ["late"]
    await asyncio.gather(*hung)


async def test_however_slow_they_are_round_trips_leave_half_of_the_turns(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagestream_streams.connection.topologies._SLOW_S", 0.0)
    monkeypatch.setattr("pagestream_streams.connection.topologies._MOST_TOGETHER", 1)
    tasks = server.begin(*range(200))
    await until_sent(server, 51)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(server.sent) == 51
    server.may_answer.set()
    assert await asyncio.gather(*tasks) == list(range(200))


async def test_a_round_trip_that_nobody_waits_for_gives_its_turn_back(server: Server) -> None:
    tasks = server.begin(*range(4))
    await until_sent(server, 4)
    held = server.turns._value
    for each in tasks[1:3]:
        each.cancel()
    await asyncio.wait(tasks[1:3])
    await asyncio.sleep(0)
    assert server.turns._value == held
    tasks[3].cancel()
    await asyncio.wait(tasks[3:])
    await eventually(lambda: server.turns._value == held + 1)
    server.may_answer.set()
    assert await tasks[0] == 0


async def test_large_commands_keep_nobody_waiting(server: Server) -> None:
    tasks = server.begin("first", "a" * 50_000, "b" * 50_000, "small", "c" * 200_000, "last")
    await until_sent(server, 6)
    assert [len(each) for each in server.sent] == [1, 1, 2, 1, 1]
    server.may_answer.set()
    await asyncio.gather(*tasks)


# -- Connections with less work behave as redis-py's own.


LARGE = b"x" * (32 << 20)  # no socket's buffers take it
QUIET: dict[str, Any] = {"driver_info": None}  # sends nothing when it connects
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Servers:
    """TCP servers that do what a test says; closed with it."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []

    async def connection(self, handler: Handler, *, limit_s: float = 60.0) -> AbstractConnection:
        """Return a connection to a server whose connections `handler` serves."""
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        self._servers.append(server)
        port = server.sockets[0].getsockname()[1]
        made = light(RedisConnection)(
            port=port, socket_timeout=limit_s, protocol=2, retry=Retry(NoBackoff(), 0), **QUIET
        )
        await made.connect()
        return made

    async def close(self) -> None:
        for server in self._servers:
            server.close()


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    made = Servers()
    yield made
    await made.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://a",
        "rediss://a",
        "unix:///a.sock",
        "redis+sentinel://a/service",
        "rediss+sentinel://a/service",
        "redis+cluster://a",
        "rediss+cluster://a",
    ],
)
async def test_all_topologies_have_them(url: str) -> None:
    topology = open_topology(url, StreamsSettings())
    if isinstance(topology, ClusterTopology):
        chosen = [topology.cluster.connection_kwargs["connection_class"]]
        chosen += [node.connection_class for node in topology.cluster.startup_nodes]
    else:
        chosen = [topology.__dict__["_redis"].connection_pool.connection_class]
    assert all(issubclass(each, Light) for each in chosen), chosen
    await topology.close()


def test_packs_as_redis_py_does() -> None:
    command = (
        "EVALSHA",
        "sha",
        2,
        b"\x00\xff\r\n",
        "",
        "unicode \u00e9",
        -5,
        1.5,
        1e300,
        memoryview(b"view"),
        LARGE[:9000],
    )
    packed = light(RedisConnection)().pack_command(*command)
    assert b"".join(packed) == b"".join(RedisConnection().pack_command(*command))


@pytest.mark.parametrize(("argument", "error"), [(None, exceptions.DataError), ("\ud800", UnicodeEncodeError)])
def test_what_can_not_be_packed_is_an_error(argument: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        light(RedisConnection)().pack_command("SET", "key", argument)


async def test_a_command_that_the_server_does_not_take_ends_by_the_sockets_limit(servers: Servers) -> None:
    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()
        writer.close()

    held = asyncio.Event()
    connection = await servers.connection(hang, limit_s=0.2)
    with pytest.raises(exceptions.TimeoutError, match="writing"):
        await connection.send_command("SET", "key", LARGE)
    assert not connection.is_connected
    held.set()


async def test_a_large_command_arrives_whole(servers: Servers) -> None:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(packed))
        writer.write(b"+OK\r\n")
        writer.close()

    packed = b"".join(RedisConnection().pack_command("SET", "key", LARGE[: 1 << 20]))
    connection = await servers.connection(take)
    await connection.send_command("SET", "key", LARGE[: 1 << 20])
    assert await connection.read_response() == b"OK"
    await connection.disconnect()


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_server_that_closes_is_lost(servers: Servers, is_reset: bool) -> None:
    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_reset:
            writer.transport.abort()
        writer.close()

    async def ping() -> None:
        for _ in range(3):  # what is written before the end is known is lost
            await connection.send_command("PING")
            await connection.read_response()

    connection = await servers.connection(close)
    for _ in range(2):  # it connects again, and is closed again
        with pytest.raises(exceptions.ConnectionError):
            await ping()
        assert not connection.is_connected


def test_by_default_nothing_is_waited_for() -> None:
    assert not Durability.of(StreamsSettings()).is_required


def test_replicas() -> None:
    durability = Durability.of(StreamsSettings(wait_replicas=2, wait_timeout_ms=50))
    assert durability.is_required
    [*_, key], wait = durability.commands("ps:{m/0}:")
    assert (key, wait) == ("ps:{m/0}:waited", ("WAIT", 2, 50))
    durability.check([b"OK", 2])
    with pytest.raises(Unavailable, match="2 replicas within 50 ms"):
        durability.check([b"OK", 1])


def test_disk_and_replicas() -> None:
    durability = Durability(1, True, 50)
    assert durability.commands("p:")[1:] == [("WAIT", 1, 50), ("WAITAOF", 1, 1, 50)]
    durability.check([b"OK", 1, [1, 1]])
    for reached in ([0, 1], [1, 0]):
        with pytest.raises(Unavailable, match="its own disk"):
            durability.check([b"OK", 1, reached])


def test_a_server_without_the_verb_is_named() -> None:
    with pytest.raises(Unavailable, match=r"from 7\.2 on"):
        Durability(0, True, 50).check([b"OK", exceptions.ResponseError("unknown command 'WAITAOF'")])
    with pytest.raises(Unavailable, match="appendonly"):
        Durability(0, True, 50).check([b"OK", exceptions.ResponseError("appendonly is disabled")])
    for replies in ([exceptions.ConnectionError("gone"), 1], [b"OK", exceptions.ConnectionError("gone")]):
        with pytest.raises(exceptions.ConnectionError):
            Durability(0, True, 50).check(replies)


SETTINGS = StreamsSettings()


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "rediss://user:secret@host:6380/1?ssl_ca_certs=/ca.crt",
        "unix:///run/redis.sock",
        "redis://[::1]:6379/0",
        "redis+sentinel://a:26379,b,[::1]:26380/pagestream/2",
        "redis+sentinel://user:secret@[::1],localhost,[fd00::1%eth0]:26380/pagestream",
        "rediss+sentinel://user:secret@a/pagestream?ssl_ca_certs=/ca.crt&sentinel_password=other",
    ],
)
async def test_one_server_at_a_time(url: str) -> None:
    link = open_topology(url, SETTINGS)
    assert not isinstance(link, ClusterTopology)
    await link.close()


@pytest.mark.parametrize("hosts", ["a:7000,b:7001", "[fd00::1]:7000,[fd00::2]", "a,[::1]:7001"])
async def test_a_cluster(hosts: str) -> None:
    link = open_topology(f"redis+cluster://user:secret@{hosts}", SETTINGS)
    assert isinstance(link, ClusterTopology)
    await link.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:6379", "begins with"),
        ("http://a", "begins with"),
        ("redis+sentinel://a:26379", "service"),
        ("redis+sentinel://a/pagestream/zero", "service"),
        ("redis+cluster://a:7000/0", "one database"),
        ("redis+cluster://a:port", "host:port"),
        ("redis+cluster://a,,b", "host:port"),
        ("redis+cluster://::1:7000", "host:port"),
        ("redis+cluster://a:70000", "host:port"),
        ("redis+sentinel://[::1:26379/pagestream", "host:port"),
        ("redis+cluster://a?ssl_ca_certs=/x", "unknown option"),
        ("rediss+cluster://a?colour=red", "colour"),
    ],
)
def test_what_is_wrong_is_said(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_topology(url, SETTINGS)


async def test_a_connection_that_was_closed_under_a_writer_is_lost() -> None:
    connection = RedisConnection()
    with pytest.raises(exceptions.ConnectionError, match="closed"), closed_transport_as_connection_error():
        await connection._send_packed_command([b"PING"])


@pytest.mark.parametrize(
    "error", [RuntimeError("of our own"), AttributeError("'NoneType' object has no attribute 'x'")]
)
async def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), closed_transport_as_connection_error():
        raise error


async def test_a_gateway_that_hears_slowly_has_one_message_on_its_way() -> None:
    """The others have theirs, and what comes meanwhile goes with the next."""
    heard: list[tuple[str, int]] = []
    open_now, most = 0, 0
    release = asyncio.Event()

    class Slow:
        keyspace = Keyspace()

        async def pipeline(self, commands: Sequence[Any], limit_s: float) -> list[int]:
            nonlocal open_now, most
            [(_, channel, data)] = commands
            open_now += 1
            most = max(most, open_now)
            if "slow" in channel:
                await release.wait()
            heard.append((channel, len(data)))
            open_now -= 1
            return [1]

    wake_ups = WakeUpSender(cast(Connection, Slow()), 1.0)
    for number in range(200):
        wake_ups.send([(wake_up_message(LogSlice(request_id="r", first_index=number)), b"slow quick ")])
        await asyncio.sleep(0)
    await eventually(lambda: sum("quick" in channel for channel, _ in heard) > 0)
    assert not any("slow" in channel for channel, _ in heard)
    assert most <= 2
    release.set()
    await eventually(lambda: not wake_ups.is_sending)
    assert sum("slow" in channel for channel, _ in heard) == 2
    release.clear()
    wake_ups.send([(wake_up_message(LogSlice(request_id="r")), b"slow ")])
    await asyncio.sleep(0)
    await wake_ups.stop()
    assert not wake_ups.is_sending
