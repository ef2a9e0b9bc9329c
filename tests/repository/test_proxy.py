import asyncio
from collections.abc import AsyncIterator

import pytest
from support.network.proxy import Proxy
from support.processes.stack import free_port
from support.processes.waiting import LIMIT_S

SILENCE_S = 0.1


@pytest.fixture
async def upstream() -> AsyncIterator[int]:
    """Run an echo server, which ends a connection on "bye"; yield its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (line := await reader.readline()) not in (b"", b"bye\n"):
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_carries_both_ways_and_ends_with_its_upstream(upstream: int) -> None:
    async with Proxy(upstream) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"one\n")
        assert await reader.readline() == b"one\n"
        writer.write(b"bye\n")
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()


async def test_a_cut_carries_nothing_and_closes_nothing_until_it_is_healed(upstream: int) -> None:
    async with Proxy(upstream) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"one\n")
        await reader.readline()
        proxy.cut()
        assert proxy.is_cut
        writer.write(b"two\nbye\n")
        late_reader, late_writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        late_writer.write(b"three\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), SILENCE_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(late_reader.read(1), SILENCE_S)
        proxy.heal()
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b"two\n"
        assert await asyncio.wait_for(late_reader.readline(), LIMIT_S) == b"three\n"
        for each in (writer, late_writer):
            each.close()


async def test_a_dead_upstream_ends_the_connection() -> None:
    async with Proxy(free_port()) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()
