"""Redis is killed and comes back on its files: no engine counts as dead; the server as a child process."""

import asyncio
import dataclasses
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_STOP, REQUEST_STATE_QUEUED
from pagestream.v1.records_pb2 import LogEntry
from pagestream_streams import Broker, Claim, EmbeddedRedis, GatewaySession, ServerBinary, Unavailable, server_command
from pagestream_streams.connection import free_port, socket_path
from redis import Redis
from support.protocol.token_streams import (
    CALM,
    LIMIT_S,
    TENANT,
    Worker,
    append_of,
    card,
    ending,
    eventually,
    lapse,
    numbers,
    once_there,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.servers import kill_written, oldest_server, running_server

pytestmark = pytest.mark.served

COUNT = 30


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with running_server(tmp_path_factory.mktemp("redis"), oldest_server()) as server:
        yield server


@pytest.fixture
async def broker(server: EmbeddedRedis) -> AsyncIterator[Broker]:
    async with await Broker.connect(server.url, CALM) as broker:
        await broker.publish_model(card(), partitions=2)
        yield broker


async def generate_stubbornly(engine: Worker, claim: Claim, half_way: asyncio.Event, go_on: asyncio.Event) -> None:
    """Tokens one by one; an append without an answer is repeated as it is, as an engine does."""
    entries = tokens(range(100, 100 + COUNT))
    entries += ending(entries[-1].digest, count=COUNT)
    for index, entry in enumerate(entries):
        if index == COUNT // 2:
            half_way.set()
            await go_on.wait()
        step = [append_of(claim, index, [entry])]
        while True:
            try:
                [outcome] = await engine.session.append(step)
            except Unavailable:
                await asyncio.sleep(0.05)
            else:
                assert not outcome.lost, outcome
                break


async def test_streams_go_on_by_the_same_claims(server: EmbeddedRedis, broker: Broker) -> None:
    """Readers wait, no engine is taken for dead, no client counts as gone, and no object is created again.

    Every lease has lapsed when the server comes back.
    """
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        requests = [spec(partition=number % 2, grace_ms=0) for number in range(6)]
        for request in requests:
            await gateway.accept(request)
        reading = [asyncio.create_task(read_all(gateway, request.request_id)) for request in requests]
        claims = await engine.claim(len(requests))
        go_on, half_way = asyncio.Event(), [asyncio.Event() for _ in claims]
        generating = [
            asyncio.create_task(generate_stubbornly(engine, claim, half, go_on))
            for claim, half in zip(claims, half_way, strict=True)
        ]
        for half in half_way:
            await half.wait()

        timers = engine.session.lease, engine.session.sweeper, gateway.heartbeat, gateway.sweeper
        for timer in timers:
            await timer.stop()
        await lapse(broker, engine.session, gateway)
        kill_written(server)
        for timer in timers:
            timer.start()
        with pytest.raises(Unavailable):
            await gateway.accept(spec())
        with pytest.raises(Unavailable):
            await broker.ping()
        go_on.set()
        await server.start()

        await asyncio.wait_for(asyncio.gather(*generating), LIMIT_S)
        for entries in await asyncio.gather(*reading):
            assert numbers(entries) == list(range(100, 100 + COUNT))
            assert entries[-1].end.reason == FINISH_REASON_STOP
        assert engine.lost == []
        for request in requests:
            assert (await broker.view(request.request_id, TENANT)).attempts == 1
        late = spec()
        await gateway.accept(late)
        [claim] = await engine.claim()
        await engine.generate(claim, 3, finish=True)
        assert numbers(await read_all(gateway, late.request_id)) == [100, 101, 102]


async def test_what_was_queued_is_still_queued(server: EmbeddedRedis, broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        request = spec()
        await gateway.accept(request)
        reading = asyncio.create_task(read_all(gateway, request.request_id))
        kill_written(server)
        await server.start()
        async with worker(broker) as engine:
            [claim] = await engine.claim()
            await engine.generate(claim, 3, finish=True)
            assert numbers(await reading) == [100, 101, 102]


async def test_an_engine_that_died_during_the_outage_is_reclaimed_from(server: EmbeddedRedis, broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a, worker(broker, "b") as b:
        request = spec()
        await gateway.accept(request)
        [claim] = await a.claim()
        await a.generate(claim, 2)
        kill_written(server)
        await a.session.lease.stop()
        await server.start()

        async def is_reclaimed() -> bool:
            """The first sweep of another process of Redis starts all leases anew."""
            await lapse(broker, a.session)
            return (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_QUEUED

        await once_there(partial(eventually, is_reclaimed))
        [again] = await b.claim()
        assert (again.epoch, again.log.tokens[0].tolist()) == (2, [100, 101])


async def test_a_reader_waits_for_a_limited_time(server: EmbeddedRedis, broker: Broker) -> None:
    impatient = dataclasses.replace(CALM, outage_limit_s=0.3)
    async with await Broker.connect(server.url, impatient) as other, GatewaySession(other) as gateway:
        request = spec()
        await gateway.accept(request)
        stream = gateway.read(request.request_id, tenant=TENANT)
        first: asyncio.Task[list[LogEntry]] = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        server.kill()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(first, LIMIT_S)
        await stream.aclose()
        await server.start()


async def test_connect_waits_for_a_server_that_is_starting(server: EmbeddedRedis) -> None:
    server.kill()
    connecting = asyncio.create_task(Broker.connect(server.url, CALM))
    await asyncio.sleep(0.2)
    await server.start()
    async with await connecting as broker:
        await broker.ping()


async def test_connect_gives_up(server: EmbeddedRedis) -> None:
    server.kill()
    with pytest.raises(Unavailable):
        await Broker.connect(server.url, dataclasses.replace(CALM, connect_timeout_s=0.2))


# -- The server as a child process: ready when started, its data kept over every kind of end.


@pytest.fixture(name="binary")
def oldest() -> ServerBinary:
    return oldest_server()


async def test_data_outlives_stop_and_kill(tmp_path: Path, binary: ServerBinary) -> None:
    server = EmbeddedRedis(tmp_path / "data", binary=binary)
    for number, end in enumerate(("stop", "kill", "stop")):
        await server.start()
        with Redis.from_url(server.url) as client:
            assert client.incr("starts") == number + 1
        if end == "stop":
            await server.stop()
        else:
            kill_written(server)
        assert server.pid is None


async def test_a_port_that_is_taken_is_told_with_the_server_s_words(tmp_path: Path, binary: ServerBinary) -> None:
    port = free_port()
    first = EmbeddedRedis(tmp_path / "a", port=port, binary=binary)
    await first.start()
    second = EmbeddedRedis(tmp_path / "b", port=port, binary=binary)
    try:
        with pytest.raises(Unavailable, match="ended with"):
            await second.start()
    finally:
        await first.stop()


async def test_only_its_user_can_open_its_socket(tmp_path: Path, binary: ServerBinary) -> None:
    server = EmbeddedRedis(tmp_path / "data", binary=binary)
    await server.start()
    try:
        socket = tmp_path / "data" / "redis.sock"
        assert server.where == socket
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        with Redis.from_url(server.url) as client:
            assert client.config_get("port") == {"port": "0"}
    finally:
        await server.stop()


async def test_a_path_that_is_too_long_for_a_socket_gets_a_folder_of_this_user_alone(
    tmp_path: Path, binary: ServerBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Path(tempfile.mkdtemp(prefix="ps-"))  # short
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    data = tmp_path / ("long-name-" * 12)
    server = EmbeddedRedis(data, binary=binary)
    assert isinstance(server.where, Path)
    folder = server.where.parent
    assert folder.parent == runtime
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    await server.start()
    try:
        with Redis.from_url(server.url) as client:
            assert client.config_get("dir") == {"dir": str(data)}
        assert socket_path(data) == server.where == folder / "redis.sock"
    finally:
        await server.stop()
    folder.chmod(0o755)
    with pytest.raises(Unavailable, match="is not a folder of this user alone"):
        socket_path(data)
    shutil.rmtree(runtime)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(data))  # too long itself
    assert socket_path(data).is_relative_to(tempfile.gettempdir())


def test_command_keeps_append_only_files_and_listens_here_only(tmp_path: Path, binary: ServerBinary) -> None:
    command = server_command(binary, tmp_path, 1234)
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "everysec"
    assert options["--bind"] == "127.0.0.1"
    assert options["--dir"] == str(tmp_path)
    assert options["--port"] == "1234"
