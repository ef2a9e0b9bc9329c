"""Redis closes a connection just before a command is written: uvloop reports it with an error of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from pagestream_streams.connection.connection import Connection
from pagestream_streams.connection.light import Light
from pagestream_streams.connection.scripts import Script
from pagestream_streams.connection.subscription import Subscription
from pagestream_streams.errors import Unavailable
from redis import exceptions
from support.protocol.token_streams import FAST

ECHO = Script("echo", "return ARGV[1]")
LIMIT_S = 20.0


@pytest.fixture
def is_closed_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, the next command finds its connection closed, after redis-py has looked whether it is."""
    is_due = False
    send = Light.send_packed_command

    async def closed(socket: Light, *arguments: Any, **options: Any) -> None:
        nonlocal is_due
        if is_due and socket.is_connected:
            is_due = False
            socket._writer.transport.abort()
            await asyncio.sleep(0.01)  # the loop closes the handle in its next turn
        await send(socket, *arguments, **options)

    def due() -> None:
        nonlocal is_due
        is_due = True

    monkeypatch.setattr(Light, "send_packed_command", closed)
    return due


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    connection = Connection(url, FAST)
    await connection.open()
    try:
        yield connection
    finally:
        await connection.close()


def on_uvloop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    uvloop.run(limited())


def test_uvloop_has_a_word_of_its_own(redis_url: str, is_closed_once: Callable[[], None]) -> None:
    async def scenario() -> None:
        async with connected(redis_url) as connection:
            is_closed_once()
            with pytest.raises(RuntimeError, match="handler is closed"):
                await connection.topology.execute("PING")

    on_uvloop(scenario)


def test_what_may_be_repeated_runs_on_another_connection(redis_url: str, is_closed_once: Callable[[], None]) -> None:
    async def scenario() -> None:
        async with connected(redis_url) as connection:
            assert await connection.run(ECHO, "key", "before") == b"before"
            is_closed_once()
            assert await connection.run(ECHO, "key", "after") == b"after"

    on_uvloop(scenario)


def test_what_must_not_be_repeated_is_an_outage(redis_url: str, is_closed_once: Callable[[], None]) -> None:
    async def scenario() -> None:
        async with connected(redis_url) as connection:
            is_closed_once()
            with pytest.raises(Unavailable) as caught:
                await connection.run(replace(ECHO, repeat=False), "key", "x")
            assert isinstance(caught.value.__cause__, exceptions.ConnectionError)
            assert await connection.execute("PING") is True

    on_uvloop(scenario)


def test_a_subscription_connects_again(redis_url: str, is_closed_once: Callable[[], None]) -> None:
    async def scenario() -> None:
        async with connected(redis_url) as connection:
            heard: asyncio.Queue[bytes] = asyncio.Queue()
            subscription = Subscription(connection, ["channel"], on_message=heard.put_nowait, on_gap=lambda: None)
            is_closed_once()
            subscription.start()
            try:
                assert await subscription.subscribed(LIMIT_S)
                await connection.execute("PUBLISH", "channel", "word")
                assert await heard.get() == b"word"
            finally:
                await subscription.stop()

    on_uvloop(scenario)


def test_other_tasks_get_their_turn_where_a_message_yields(redis_url: str) -> None:
    async def scenario() -> None:
        done: list[str] = []
        ended = asyncio.Event()

        def take(message: bytes) -> Iterator[None]:
            asyncio.get_running_loop().call_soon(done.append, "another's")
            done.append("first half")
            yield
            done.append("second half")
            if message == b"last":
                ended.set()

        async with connected(redis_url) as connection:
            subscription = Subscription(connection, ["channel"], on_message=take, on_gap=lambda: None)
            subscription.start()
            try:
                assert await subscription.subscribed(LIMIT_S)
                await connection.pipeline([("PUBLISH", "channel", "one"), ("PUBLISH", "channel", "last")])
                await asyncio.wait_for(ended.wait(), LIMIT_S)
            finally:
                await subscription.stop()
        assert done == ["first half", "another's", "second half"] * 2

    on_uvloop(scenario)
