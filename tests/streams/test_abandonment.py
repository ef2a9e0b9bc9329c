"""Requests without readers: the disconnect grace, which requests have one, and when it counts."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED, ON_DISCONNECT_CONTINUE, REQUEST_STATE_FINISHED
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, GatewaySession
from pagestream_streams.protocol import Partition
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import (
    CALM,
    FORGETFUL,
    MODEL,
    TENANT,
    Worker,
    eventually,
    lapse,
    numbers,
    read_all,
    spec,
    worker,
)

pytestmark = pytest.mark.served

LONG_MS = 3_600_000
"""A grace that no test waits for: `expire` ends it."""
HERE = Partition(MODEL, 0)


async def finished(broker: Broker, request: RequestSpec) -> bool:
    return (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_FINISHED


async def read_some(gateway: GatewaySession, request: RequestSpec) -> None:
    async with aclosing(gateway.read(request.request_id, tenant=TENANT)) as batches:
        await anext(batches)


async def readers(broker: Broker, request: RequestSpec) -> list[str]:
    found: bytes = await broker.connection.execute("HGET", HERE.request(request.request_id), "readers")
    return found.decode().split()


async def grace(broker: Broker, request: RequestSpec) -> float | None:
    """When a request's grace ends; None where it has none."""
    found = await broker.connection.execute("ZSCORE", f"{HERE.prefix}graces", request.request_id)
    return None if found is None else float(found)


async def in_grace(broker: Broker, request: RequestSpec) -> None:
    async def is_there() -> bool:
        return await grace(broker, request) is not None

    await eventually(is_there)


async def out_of_grace(broker: Broker, request: RequestSpec) -> None:
    async def is_gone() -> bool:
        return await grace(broker, request) is None

    await eventually(is_gone)


async def expire(broker: Broker, request: RequestSpec) -> None:
    """Have a grace that has begun be over."""
    await in_grace(broker, request)
    await broker.connection.execute("ZADD", f"{HERE.prefix}graces", "XX", 1, request.request_id)


async def swept_twice(broker: Broker) -> None:
    """Wait for a whole sweep that begins from now on."""
    for _ in range(2):
        before = await broker.connection.execute("HGET", f"{HERE.prefix}meta", "swept")

        async def is_over(before: bytes | None = before) -> bool:
            found: bytes | None = await broker.connection.execute("HGET", f"{HERE.prefix}meta", "swept")
            return found != before

        await eventually(is_over)


async def deserted(broker: Broker) -> bool:
    """Whether a sweep has found no gateway. Noted already while none has come: then this one must have gone."""
    living = await broker.connection.execute("ZCARD", f"{HERE.prefix}gateways")
    return living == 0 and bool(await broker.connection.execute("HEXISTS", f"{HERE.prefix}meta", "deserted"))


async def die(broker: Broker, gateway: GatewaySession) -> None:
    """What SIGKILL does to a gateway, and the time does then."""
    for task in (gateway.heartbeat, gateway.sweeper, gateway.readers.timer, gateway.subscription):
        await task.stop()
    await lapse(broker, gateway)


@asynccontextmanager
async def begun(broker: Broker, gateway: GatewaySession, request: RequestSpec) -> AsyncIterator[Worker]:
    """A request with one token, and its engine."""
    async with worker(broker) as engine:
        await gateway.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 1)
        yield engine


async def test_a_request_that_all_readers_left_is_cancelled_after_its_grace(broker: Broker) -> None:
    request = spec(grace_ms=150)
    async with GatewaySession(broker) as gateway, begun(broker, gateway, request) as engine:
        await read_some(gateway, request)
        await eventually(lambda: finished(broker, request))
        assert (await broker.view(request.request_id, TENANT)).finish_reason == FINISH_REASON_CANCELLED
        await eventually(lambda: engine.lost == [request.request_id])


async def test_a_reader_that_is_cancelled_while_redis_answers_has_left(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py can lose a cancellation that comes together with a reply."""
    reading = asyncio.Event()

    async def lose(*_: object) -> list[object]:
        reading.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return []

    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec(grace_ms=LONG_MS)
        await gateway.accept(request)
        [claim] = await engine.claim()
        gateway.readers.on_gap()  # so that the log is read
        monkeypatch.setattr(broker.connection, "read_acknowledged", lose)
        task = asyncio.create_task(read_some(gateway, request))
        await asyncio.wait_for(reading.wait(), LIMIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT_S)
        await expire(broker, request)
        await eventually(lambda: engine.lost == [claim.request_id])


async def test_a_reader_who_comes_back_ends_the_grace(broker: Broker) -> None:
    request = spec(grace_ms=LONG_MS)
    async with GatewaySession(broker) as one, GatewaySession(broker) as other, begun(broker, one, request):
        await read_some(one, request)
        await in_grace(broker, request)
        async with aclosing(other.read(request.request_id, tenant=TENANT)) as batches:
            await anext(batches)
            await out_of_grace(broker, request)
        await expire(broker, request)
        await eventually(lambda: finished(broker, request))


async def test_one_of_two_readers_may_leave(broker: Broker) -> None:
    request = spec(grace_ms=LONG_MS)
    async with GatewaySession(broker) as gateway, GatewaySession(broker) as other, begun(broker, gateway, request):
        async with aclosing(gateway.read(request.request_id, tenant=TENANT)) as batches:
            await anext(batches)
            await read_some(gateway, request)  # of two in one gateway
            await read_some(other, request)  # and of two gateways

            async def one_reads() -> bool:
                return await readers(broker, request) == [gateway.gateway_id]

            await eventually(one_reads)
            await swept_twice(broker)
            assert await grace(broker, request) is None


async def test_on_disconnect_continue_has_no_grace(broker: Broker) -> None:
    request = spec(grace_ms=0, on_disconnect=ON_DISCONNECT_CONTINUE)
    async with GatewaySession(broker) as gateway, begun(broker, gateway, request):
        await read_some(gateway, request)

        async def none_reads() -> bool:
            return await readers(broker, request) == []

        await eventually(none_reads)
        await swept_twice(broker)
        assert not await finished(broker, request)


async def test_an_accepted_request_that_is_never_read_is_abandoned(broker: Broker, redis_url: str) -> None:
    """Its client went away between accept and read."""
    async with await Broker.connect(redis_url, FORGETFUL) as forgetful, GatewaySession(forgetful) as gateway:
        request = spec(grace_ms=150)
        await gateway.accept(request)
        await eventually(lambda: finished(broker, request))


async def test_who_could_not_know_that_its_gateway_died_has_time_to_notice(broker: Broker, redis_url: str) -> None:
    """A client that left said so; that of a silent gateway still waits for an answer."""
    slow = dataclasses.replace(FORGETFUL, silence_ms=600_000)
    async with (
        await Broker.connect(redis_url, slow) as patient,
        GatewaySession(patient) as alive,
        GatewaySession(patient) as dead,
    ):
        requests = spec(grace_ms=60_000), spec(grace_ms=60_000)
        for gateway, request in zip((alive, dead), requests, strict=True):
            await gateway.accept(request)
        reading = asyncio.create_task(read_some(dead, requests[1]))
        await eventually(lambda: not dead.readers.registrations.expected)
        await die(broker, dead)
        for request in requests:
            await in_grace(broker, request)
        left, silent = [await grace(broker, request) for request in requests]
        assert left is not None
        assert silent is not None
        assert 400_000 < silent - left < 800_000
        reading.cancel()
        await asyncio.wait([reading])


async def test_who_leaves_later_does_not_shorten_what_a_silent_gateway_s_client_has(
    broker: Broker, redis_url: str
) -> None:
    slow = dataclasses.replace(CALM, silence_ms=600_000)
    async with (
        await Broker.connect(redis_url, slow) as patient,
        GatewaySession(patient) as alive,
        GatewaySession(patient) as dead,
    ):
        request = spec(grace_ms=60_000)
        await dead.accept(request)
        readings = [asyncio.create_task(read_some(each, request)) for each in (dead, alive)]

        async def both_read() -> bool:
            return len(await readers(broker, request)) == 2

        async def one_reads() -> bool:
            return await readers(broker, request) == [alive.gateway_id]

        await eventually(both_read)
        seconds, _ = await broker.connection.execute("TIME")
        await die(broker, dead)
        await eventually(one_reads)
        for reading in readings:
            reading.cancel()
        await asyncio.wait(readings)
        await in_grace(broker, request)
        until = await grace(broker, request)
        assert until is not None
        assert until > int(seconds) * 1000 + 600_000


async def test_graces_don_t_count_while_no_gateway_lives(broker: Broker) -> None:
    """No client can come back then. A tool that looks on is no gateway, and has its own requests served."""
    request = spec(grace_ms=200)
    async with GatewaySession(broker) as gateway, begun(broker, gateway, request) as engine:
        reading = gateway.read(request.request_id, tenant=TENANT)
        await anext(reading)
        await die(broker, gateway)
        await eventually(lambda: deserted(broker))
        async with GatewaySession(broker, "tool", serves=False) as tool:
            copy = spec(grace_ms=200, on_disconnect=ON_DISCONNECT_CONTINUE)
            await tool.accept(copy)
            [second] = await engine.claim()
            copied = asyncio.create_task(read_all(tool, copy.request_id))
            await engine.generate(second, 2, finish=True)
            assert numbers(await copied) == [100, 101]
            await expire(broker, request)
            await swept_twice(broker)
            assert not await finished(broker, request)
            assert await deserted(broker)
        async with GatewaySession(broker):
            await eventually(lambda: finished(broker, request))
        await reading.aclose()


async def test_a_gateway_that_was_taken_for_dead_registers_again(broker: Broker) -> None:
    request = spec(grace_ms=LONG_MS)
    async with GatewaySession(broker), GatewaySession(broker) as gateway, begun(broker, gateway, request):
        async with aclosing(gateway.read(request.request_id, tenant=TENANT)) as batches:
            await anext(batches)
            await gateway.heartbeat.stop()
            await gateway.readers.timer.stop()
            await lapse(broker, gateway)
            await in_grace(broker, request)
            gateway.heartbeat.start()
            gateway.readers.start()
            await out_of_grace(broker, request)
            assert not await finished(broker, request)
