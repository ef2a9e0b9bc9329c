"""Connections with less work behave as redis-py's own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from pagestream_streams import StreamsSettings
from pagestream_streams.connection.cluster import ClusterTopology
from pagestream_streams.connection.light import Light, light
from pagestream_streams.connection.topologies import SingleServer, open_topology
from redis import exceptions
from redis.asyncio.connection import AbstractConnection, Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

LARGE = b"x" * (32 << 20)  # no socket's buffers take it
QUIET: dict[str, Any] = {"driver_info": None}  # sends nothing when it connects
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Servers:
    """TCP servers that do what a test says; closed with it."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []

    async def connection(self, handler: Handler) -> AbstractConnection:
        """Return a connection to a server whose connections `handler` serves."""
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        self._servers.append(server)
        port = server.sockets[0].getsockname()[1]
        made = light(Connection)(port=port, socket_timeout=0.2, protocol=2, retry=Retry(NoBackoff(), 0), **QUIET)
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
        assert isinstance(topology, SingleServer)
        chosen = [topology._redis.connection_pool.connection_class]
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
    packed = light(Connection)().pack_command(*command)
    assert b"".join(packed) == b"".join(Connection().pack_command(*command))


@pytest.mark.parametrize(("argument", "error"), [(None, exceptions.DataError), ("\ud800", UnicodeEncodeError)])
def test_what_can_not_be_packed_is_an_error(argument: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        light(Connection)().pack_command("SET", "key", argument)


async def test_a_command_that_the_server_does_not_take_ends_by_the_sockets_limit(servers: Servers) -> None:
    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()
        writer.close()

    held = asyncio.Event()
    connection = await servers.connection(hang)
    with pytest.raises(exceptions.TimeoutError, match="writing"):
        await connection.send_command("SET", "key", LARGE)
    assert not connection.is_connected
    held.set()


async def test_a_large_command_arrives_whole(servers: Servers) -> None:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(packed))
        writer.write(b"+OK\r\n")
        writer.close()

    packed = b"".join(Connection().pack_command("SET", "key", LARGE[: 1 << 20]))
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
