"""Connections to a real server: commands that share one, that lose it, and beats that are not answered."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from pagestream_streams import Broker, EmbeddedRedis, GatewaySession, StreamsSettings, Unavailable
from pagestream_streams.connection import Connection, Subscription
from pagestream_streams.connection.topologies import Light
from pagestream_streams.scripts import Script
from redis import exceptions
from redis.exceptions import DataError
from support.network.proxy import Proxy
from support.processes.waiting import LIMIT_S, until
from support.protocol.token_streams import CALM, Worker, numbers, read_all, spec, worker

pytestmark = pytest.mark.served

COUNT = Script("count", "return redis.call('INCRBY', KEYS[1], ARGV[1])")


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    opened = Connection(redis_url, CALM)
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


# -- Redis closes a connection just before a command is written: uvloop reports it with an error of its own.


ECHO = Script("echo", "return ARGV[1]")


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
    connection = Connection(url, CALM)
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


def test_a_transport_that_is_closed_is_a_lost_connection(redis_url: str, is_closed_once: Callable[[], None]) -> None:
    async def scenario() -> None:
        async with connected(redis_url) as connection:
            is_closed_once()
            with pytest.raises(exceptions.ConnectionError, match="the server has closed the connection"):
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


async def test_a_subscription_outlives_a_bug(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it is: without wake-ups each read would poll for the rest of the process' life."""
    gaps, heard = list[int](), asyncio.Queue[bytes]()

    def note_gap() -> None:
        gaps.append(len(gaps))
        if len(gaps) == 1:
            raise KeyError("a bug")
        if len(gaps) == 2:
            raise asyncio.CancelledError("of something else")

    async with connected(redis_url) as connection:
        subscription = Subscription(connection, ["channel"], on_message=heard.put_nowait, on_gap=note_gap)
        subscription.start()
        try:
            await until(lambda: len(gaps) == 3, "the third connection")
            await connection.execute("PUBLISH", "channel", "word")
            assert await asyncio.wait_for(heard.get(), LIMIT_S) == b"word"
        finally:
            await subscription.stop()
    assert "it connects again" in caplog.text


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


# -- Beats that are not answered: an engine lives as long as one of them comes through.


SHIPPED = StreamsSettings()
# What is tested is how the shipped times stand to each other. As they are, they leave a busy machine 0.3 s to be late
# in; larger ones leave it more, and it is no later for that.
SCALE = 3
AS_SHIPPED = dataclasses.replace(
    CALM,
    lease_ms=SCALE * SHIPPED.lease_ms,
    heartbeat_ms=SCALE * SHIPPED.heartbeat_ms,
    sweep_ms=SCALE * SHIPPED.sweep_ms,
    sweep_gap_ms=SCALE * SHIPPED.sweep_gap_ms,
    command_timeout_s=SCALE * SHIPPED.command_timeout_s,
)
STRANDED = 4  # connections, of pipelines that run at the same time
PAUSE_MS = SCALE * (SHIPPED.sweep_gap_ms - 50)
BETWEEN_S = SCALE * 0.45


async def claims_nothing(other: Worker, seconds: float) -> None:
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        assert await other.session.claim(max_requests=1, max_prompt_tokens=100) == []
        await other.session.wait_for_work(0.05)


@pytest.mark.slow
async def test_connections_that_fall_silent_cost_no_lease(broker: Broker, redis_server: EmbeddedRedis) -> None:
    """Other commands wait for their answer for longer than a lease; a beat does not, and the next one connects anew."""
    async with (
        Proxy(redis_server.port) as network,
        await Broker.connect(redis_server.url, AS_SHIPPED) as near,
        await Broker.connect(f"redis://{network.target}/0", AS_SHIPPED) as far,
        GatewaySession(near) as gateway,
        worker(far, "a") as a,
        worker(near, "b") as b,
    ):
        request = spec()
        await gateway.accept(request)
        [claim] = await a.claim()
        await asyncio.gather(*(far.connection.pipeline([("PING",)]) for _ in range(STRANDED)))
        assert network.num_connections > STRANDED
        network.strand()
        await claims_nothing(b, 2.5 * AS_SHIPPED.lease_ms / 1000)
        assert a.lost == []
        await a.generate(claim, 2, finish=True)


@pytest.mark.slow
async def test_a_gateway_whose_connections_fall_silent_stays_a_reader(
    broker: Broker, redis_server: EmbeddedRedis
) -> None:
    async with (
        Proxy(redis_server.port) as network,
        await Broker.connect(redis_server.url, AS_SHIPPED) as near,
        await Broker.connect(f"redis://{network.target}/0", AS_SHIPPED) as far,
        GatewaySession(near),
        GatewaySession(far) as gateway,
        worker(near, "a") as a,
    ):
        request = spec()
        await gateway.accept(request)
        reading = asyncio.create_task(read_all(gateway, request.request_id, limit_s=LIMIT_S))
        [claim] = await a.claim()
        digest = await a.generate(claim, 1)
        await asyncio.gather(*(far.connection.pipeline([("PING",)]) for _ in range(STRANDED)))
        network.strand()
        where = await near.directory.locate(request.request_id)
        until = asyncio.get_running_loop().time() + 2.5 * AS_SHIPPED.lease_ms / 1000
        while asyncio.get_running_loop().time() < until:
            readers = await near.connection.execute("HGET", where.request(request.request_id), "readers")
            assert gateway.gateway_id.encode() in readers
            await asyncio.sleep(0.1)
        await a.generate(dataclasses.replace(claim, next_index=1, digest=digest), 2, finish=True)
        assert numbers(await reading) == [100, 101]


@pytest.mark.slow
async def test_a_pause_of_redis_that_is_no_outage_costs_no_lease(broker: Broker, redis_server: EmbeddedRedis) -> None:
    """Shorter than the hole that starts leases anew, and at any time between two beats."""
    async with (
        await Broker.connect(redis_server.url, AS_SHIPPED) as near,
        GatewaySession(near) as gateway,
        worker(near, "a") as a,
        worker(near, "b") as b,
    ):
        await gateway.accept(spec())
        [claim] = await a.claim()
        for _ in range(4):
            await near.connection.execute("CLIENT", "PAUSE", PAUSE_MS, "ALL")
            await claims_nothing(b, BETWEEN_S)
        assert a.lost == []
        await a.generate(claim, 2, finish=True)
