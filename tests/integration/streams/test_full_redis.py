"""Redis at its memory limit (`maxmemory`): what was accepted is kept, read, joined, cancelled and ended."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED, REQUEST_STATE_FINISHED
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_streams import Broker, GatewaySession, StorageFull, StreamsSettings
from pagestream_streams.protocol.keys import Partition
from support.protocol.token_streams import FAST, MODEL, TENANT, card, eventually, numbers, read_all, spec, worker
from support.redis.topologies import Place, Topology, ask_all

HERE = Partition(MODEL, 0)
GRACE_MS = 300
Memory = Callable[[int], object]


@pytest.fixture
async def memory(redis_server: Place) -> AsyncIterator[Memory]:
    """Sets how many bytes Redis may use: with one it refuses all that needs memory, with 0 nothing."""
    yield lambda amount: ask_all(redis_server, "CONFIG", "SET", "maxmemory", amount)
    ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)


async def now_ms(broker: Broker) -> int:
    seconds, micros = await broker.connection.execute("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def some_graces_pass(broker: Broker) -> None:
    """Wait for three graces by Redis' clock, and a sweep after them."""
    until = await now_ms(broker) + 3 * GRACE_MS

    async def is_over() -> bool:
        return int(await broker.connection.execute("HGET", f"{HERE.prefix}meta", "swept")) > until

    await eventually(is_over)


async def is_finished(broker: Broker, request: RequestSpec) -> bool:
    return (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_FINISHED


async def read_into(seen: list[LogEntry], gateway: GatewaySession, request: RequestSpec) -> None:
    """Read on after what was seen, as a client that has the request does."""
    digest = seen[-1].digest if seen else ""
    reads = gateway.read(request.request_id, tenant=TENANT, from_index=len(seen), digest=digest, spec=request)
    async with aclosing(reads) as batches:
        async for batch in batches:
            seen += batch


async def test_a_client_that_reconnects_is_registered_and_keeps_its_request(broker: Broker, memory: Memory) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec(grace_ms=GRACE_MS)
        await gateway.accept(request)
        seen: list[LogEntry] = []
        first = asyncio.create_task(read_into(seen, gateway, request))
        [claim] = await engine.claim()
        await engine.generate(claim, 3)
        await eventually(lambda: len(seen) == 3)
        memory(1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        registered = HERE.reads(gateway.gateway_id)

        async def is_registered() -> bool:
            return bool(await broker.connection.execute("SISMEMBER", registered, request.request_id))

        async def is_left() -> bool:
            return not await is_registered()

        await eventually(is_left)
        second = asyncio.create_task(read_into(seen, gateway, request))
        await eventually(is_registered)
        await some_graces_pass(broker)
        memory(0)
        await engine.generate(dataclasses.replace(claim, next_index=3, digest=seen[-1].digest), 5, finish=True)
        await second
        assert numbers(seen) == [100, 101, 102, 103, 104]


async def test_a_gateway_that_was_taken_for_dead_keeps_its_clients(broker: Broker, memory: Memory) -> None:
    async with GatewaySession(broker) as stalled, GatewaySession(broker), worker(broker) as engine:
        request = spec(grace_ms=GRACE_MS)
        await stalled.accept(request)
        seen: list[LogEntry] = []
        reading = asyncio.create_task(read_into(seen, stalled, request))
        [claim] = await engine.claim()
        await engine.generate(claim, 1)
        await eventually(lambda: len(seen) == 1)
        memory(1)
        await stalled.heartbeat.stop()

        async def is_taken_for_dead() -> bool:
            return await broker.connection.execute("ZSCORE", f"{HERE.prefix}gateways", stalled.gateway_id) is None

        async def is_registered() -> bool:
            readers = await broker.connection.execute("HGET", HERE.request(request.request_id), "readers")
            return stalled.gateway_id.encode() in readers

        await eventually(is_taken_for_dead)
        stalled.heartbeat.start()
        await eventually(is_registered)
        await some_graces_pass(broker)
        memory(0)
        await engine.generate(dataclasses.replace(claim, next_index=1, digest=seen[-1].digest), 2, finish=True)
        await reading
        assert numbers(seen) == [100, 101]


async def test_graces_begin_anew_when_there_is_room_again(broker: Broker, memory: Memory) -> None:
    async with GatewaySession(broker) as gateway:
        request = spec(grace_ms=GRACE_MS)
        await gateway.accept(request)
        memory(1)

        async def grace_has_begun() -> bool:
            return await broker.connection.execute("ZSCORE", f"{HERE.prefix}graces", request.request_id) is not None

        await eventually(grace_has_begun)  # it was accepted and is not read
        await some_graces_pass(broker)
        assert not await is_finished(broker, request)
        freed = await now_ms(broker)
        memory(0)
        await eventually(lambda: is_finished(broker, request))
        view = await broker.view(request.request_id, TENANT)
        assert view.finish_reason == FINISH_REASON_CANCELLED
        ended = int(await broker.connection.execute("HGET", HERE.request(request.request_id), "ended"))
        assert ended >= freed + GRACE_MS


async def test_a_known_id_is_joined_and_a_new_request_refused(broker: Broker, memory: Memory) -> None:
    async with GatewaySession(broker) as first, GatewaySession(broker) as second:
        request = spec()
        await first.accept(request)
        keyed = await first.accept_once(spec(key="k"), body_digest="d")
        memory(1)
        assert not await second.accept(request)
        assert await second.accept_once(spec(key="k"), body_digest="d") == keyed
        readers = await broker.connection.execute("HGET", HERE.request(request.request_id), "readers")
        assert readers.decode().split() == [first.gateway_id, second.gateway_id]
        with pytest.raises(StorageFull, match="maxmemory"):
            await second.accept(spec())


async def test_reads_and_cancels_that_wait_for_disk_or_replicas(
    redis_server: Place, redis_url: str, memory: Memory
) -> None:
    """A wait sends a write with it, which needs memory."""
    settings = dataclasses.replace(waits_of(redis_server), outage_limit_s=1.0, wait_timeout_ms=3000)
    async with await Broker.connect(redis_url, settings) as broker:
        await broker.publish_model(card(MODEL), partitions=2)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            done, unfinished = spec(), spec()
            await gateway.accept(done)
            [claim] = await engine.claim()
            await engine.generate(claim, 3, finish=True)
            await gateway.accept(unfinished)
            memory(1)
            assert numbers(await read_all(gateway, done.request_id)) == [100, 101, 102]
            assert await broker.cancel(unfinished.request_id, TENANT) == FINISH_REASON_CANCELLED
            assert [entry.end.reason for entry in await read_all(gateway, unfinished.request_id)][-1:] == [
                FINISH_REASON_CANCELLED
            ]


def waits_of(place: Place) -> StreamsSettings:
    """Return settings with the wait that a place has: for replicas, or for the disk from 7.2 on."""
    if isinstance(place, Topology):
        return dataclasses.replace(FAST, wait_replicas=1)
    return dataclasses.replace(FAST, wait_fsync=place.binary.version >= (7, 2))
