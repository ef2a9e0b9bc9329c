"""Redis is killed, stays away for longer than every lease, and comes back on its files: no engine counts as dead."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_STOP
from pagestream.v1.records_pb2 import LogEntry
from pagestream_streams import Broker, Claim, EmbeddedRedis, GatewaySession, Unavailable
from support.protocol.token_streams import (
    FAST,
    LIMIT_S,
    TENANT,
    Worker,
    append_of,
    card,
    ending,
    numbers,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.servers import oldest_server, running_server

COUNT = 30
AWAY_S = 3 * FAST.lease_ms / 1000


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with running_server(tmp_path_factory.mktemp("redis"), oldest_server()) as server:
        yield server


@pytest.fixture
async def broker(server: EmbeddedRedis) -> AsyncIterator[Broker]:
    async with await Broker.connect(server.url, FAST) as broker:
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
    """Readers wait, no engine is taken for dead, no client counts as gone, and no object is created again."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        requests = [spec(partition=number % 2, grace_ms=int(AWAY_S * 300)) for number in range(6)]
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

        server.kill()
        with pytest.raises(Unavailable):
            await gateway.accept(spec())
        with pytest.raises(Unavailable):
            await broker.ping()
        go_on.set()
        await asyncio.sleep(AWAY_S)
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
        server.kill()
        await asyncio.sleep(AWAY_S)
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
        server.kill()
        await a.session.heartbeat.stop()
        await server.start()
        [again] = await b.claim()
        assert (again.epoch, again.log.tokens[0].tolist()) == (2, [100, 101])


async def test_a_reader_waits_for_a_limited_time(server: EmbeddedRedis, broker: Broker) -> None:
    impatient = dataclasses.replace(FAST, outage_limit_s=0.3)
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
    connecting = asyncio.create_task(Broker.connect(server.url, FAST))
    await asyncio.sleep(0.2)
    await server.start()
    async with await connecting as broker:
        await broker.ping()


async def test_connect_gives_up(server: EmbeddedRedis) -> None:
    server.kill()
    with pytest.raises(Unavailable):
        await Broker.connect(server.url, dataclasses.replace(FAST, connect_timeout_s=0.2))
