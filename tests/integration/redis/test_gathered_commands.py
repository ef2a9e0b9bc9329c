"""Commands of many tasks over one connection, on a real server."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from pagestream_streams.connection.connection import Connection
from pagestream_streams.connection.scripts import Script
from pagestream_streams.errors import Unavailable
from redis.exceptions import DataError
from support.protocol.token_streams import FAST

COUNT = Script("count", "return redis.call('INCRBY', KEYS[1], ARGV[1])")


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    opened = Connection(redis_url, FAST)
    await opened.open()
    yield opened
    await opened.close()


async def test_each_task_has_its_own_reply(connection: Connection) -> None:
    echoes = await asyncio.gather(*(connection.execute("ECHO", str(number)) for number in range(500)))
    assert echoes == [str(number).encode() for number in range(500)]


async def test_a_script_that_the_server_does_not_know_runs_once_for_each_task(connection: Connection) -> None:
    await connection.execute("SCRIPT", "FLUSH")
    counts = await asyncio.gather(*(connection.run(COUNT, "counter", 1) for _ in range(200)))
    assert sorted(counts) == list(range(1, 201))


async def test_what_can_not_be_packed_fails_alone(connection: Connection) -> None:
    words = ["a", "b", "\ud800", "c", None, "d"]
    found = await asyncio.gather(
        *(connection.execute("ECHO", word) for word in words),  # type: ignore[arg-type]
        return_exceptions=True,
    )
    assert [each for each in found if isinstance(each, bytes)] == [b"a", b"b", b"c", b"d"]
    assert isinstance(found[2], UnicodeEncodeError)
    assert isinstance(found[4], DataError)


async def test_what_is_sent_after_the_end_is_an_outage(connection: Connection) -> None:
    await connection.close()
    with pytest.raises(Unavailable, match="closed"):
        await connection.execute("PING")
