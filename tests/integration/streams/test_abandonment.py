"""Requests without readers: the disconnect grace, which requests have one, and when it counts."""

import asyncio
import dataclasses
from contextlib import aclosing, suppress

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED, ON_DISCONNECT_CONTINUE, REQUEST_STATE_FINISHED
from pagestream_streams import Broker, GatewaySession
from support.protocol.token_streams import FAST, FORGETFUL, MODEL, TENANT, eventually, numbers, read_all, spec, worker

GRACE_MS = 150


async def finished(broker: Broker, request_id: str) -> bool:
    return (await broker.view(request_id, TENANT)).state == REQUEST_STATE_FINISHED


async def read_some(gateway: GatewaySession, request_id: str) -> None:
    async with aclosing(gateway.read(request_id, tenant=TENANT)) as batches:
        await anext(batches)


async def pause(milliseconds: float) -> None:
    """Time in which something must *not* happen."""
    await asyncio.sleep(milliseconds / 1000)


async def die(gateway: GatewaySession) -> None:
    """What SIGKILL does to a gateway."""
    for task in (gateway.heartbeat, gateway.sweeper, gateway.readers.timer, gateway.subscription):
        await task.stop()


async def test_a_request_that_all_readers_left_is_cancelled_after_its_grace(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec(grace_ms=GRACE_MS)
        await gateway.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 1)
        await read_some(gateway, request.request_id)
        await eventually(lambda: finished(broker, request.request_id))
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
        request = spec(grace_ms=GRACE_MS)
        await gateway.accept(request)
        [claim] = await engine.claim()
        gateway.readers.on_gap()  # so that the log is read
        monkeypatch.setattr(broker.connection, "read_acknowledged", lose)
        task = asyncio.create_task(read_some(gateway, request.request_id))
        await asyncio.wait_for(reading.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)
        await eventually(lambda: finished(broker, request.request_id))
        await eventually(lambda: engine.lost == [claim.request_id])


async def test_a_reader_who_comes_back_ends_the_grace(broker: Broker) -> None:
    async with GatewaySession(broker) as one, GatewaySession(broker) as other, worker(broker) as engine:
        request = spec(grace_ms=400)
        await one.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 1)
        await read_some(one, request.request_id)
        async with aclosing(other.read(request.request_id, tenant=TENANT)) as batches:
            await anext(batches)
            await pause(3 * 400)
            assert not await finished(broker, request.request_id)
        await eventually(lambda: finished(broker, request.request_id))


async def test_one_of_two_readers_may_leave(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec(grace_ms=GRACE_MS)
        await gateway.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 1)
        async with aclosing(gateway.read(request.request_id, tenant=TENANT)) as batches:
            await anext(batches)
            await read_some(gateway, request.request_id)
            await pause(4 * GRACE_MS)
            assert not await finished(broker, request.request_id)


async def test_on_disconnect_continue_has_no_grace(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec(grace_ms=GRACE_MS, on_disconnect=ON_DISCONNECT_CONTINUE)
        await gateway.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 1)
        await read_some(gateway, request.request_id)
        await pause(4 * GRACE_MS)
        assert not await finished(broker, request.request_id)


async def test_an_accepted_request_that_is_never_read_is_abandoned(broker: Broker, redis_url: str) -> None:
    """Its client went away between accept and read."""
    async with await Broker.connect(redis_url, FORGETFUL) as forgetful, GatewaySession(forgetful) as gateway:
        request = spec(grace_ms=GRACE_MS)
        await gateway.accept(request)
        await eventually(lambda: finished(broker, request.request_id))


async def test_a_dead_gateway_s_reads_get_their_grace_in_full(broker: Broker) -> None:
    async with GatewaySession(broker) as alive, GatewaySession(broker) as dead, worker(broker) as engine:
        request = spec(grace_ms=GRACE_MS)
        await dead.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 1)
        async with aclosing(dead.read(request.request_id, tenant=TENANT)) as batches:
            await anext(batches)
            await die(dead)
            await eventually(lambda: finished(broker, request.request_id))
        assert alive.gateway_id


async def test_who_could_not_know_that_its_gateway_died_has_time_to_notice(broker: Broker, redis_url: str) -> None:
    """A client that left said so; that of a silent gateway still waits for an answer."""
    # A hole in the sweeps would start all graces anew, as if no client could have noticed.
    slow = dataclasses.replace(FORGETFUL, silence_ms=600_000, lease_ms=2400, sweep_gap_ms=2200)
    async with (
        await Broker.connect(redis_url, slow) as patient,
        GatewaySession(patient) as alive,
        GatewaySession(patient) as dead,
    ):
        requests = spec(grace_ms=60_000), spec(grace_ms=60_000)
        graces = (await broker.directory.locate(requests[0].request_id)).prefix + "graces"
        for gateway, request in zip((alive, dead), requests, strict=True):
            await gateway.accept(request)
        reading = asyncio.create_task(read_some(dead, requests[1].request_id))
        await eventually(lambda: not dead.readers.registrations.expected)
        await die(dead)
        scores: dict[str, float] = {}

        async def both_wait() -> bool:
            found = await broker.connection.execute("ZRANGE", graces, 0, -1, "WITHSCORES")
            scores.update({found[i].decode(): float(found[i + 1]) for i in range(0, len(found), 2)})
            return len(scores) == 2

        await eventually(both_wait)
        left, silent = (scores[request.request_id] for request in requests)
        assert 500_000 < silent - left < 700_000
        reading.cancel()
        await asyncio.wait([reading])


async def test_who_leaves_later_does_not_shorten_what_a_silent_gateway_s_client_has(
    broker: Broker, redis_url: str
) -> None:
    slow = dataclasses.replace(FAST, silence_ms=600_000)
    async with (
        await Broker.connect(redis_url, slow) as patient,
        GatewaySession(patient) as alive,
        GatewaySession(patient) as dead,
    ):
        request = spec(grace_ms=60_000)
        prefix = (await broker.directory.locate(request.request_id)).prefix
        await dead.accept(request)
        readings = [asyncio.create_task(read_some(each, request.request_id)) for each in (dead, alive)]
        key = f"{prefix}req:{request.request_id}"

        async def readers() -> bytes:
            found: bytes = await broker.connection.execute("HGET", key, "readers")
            return found

        async def both_read() -> bool:
            return len((await readers()).split()) == 2

        async def one_reads() -> bool:
            return (await readers()).split() == [alive.gateway_id.encode()]

        await eventually(both_read)
        await die(dead)
        await eventually(one_reads)
        for reading in readings:
            reading.cancel()
        await asyncio.wait(readings)
        seconds, _ = await broker.connection.execute("TIME")

        async def grace() -> bool:
            score = await broker.connection.execute("ZSCORE", prefix + "graces", request.request_id)
            return score is not None and float(score) > int(seconds) * 1000 + 600_000

        await eventually(grace)


async def test_a_tool_that_looks_on_is_no_gateway(broker: Broker) -> None:
    """While no gateway lives no client can come back, and graces do not count, with `serves=False` too."""
    async with worker(broker) as engine:
        async with GatewaySession(broker) as gateway:
            request = spec(grace_ms=GRACE_MS)
            await gateway.accept(request)
            [claim] = await engine.claim()
            digest = await engine.generate(claim, 1)
            await die(gateway)

            async def deserted() -> bool:
                # Set already while no gateway has come: then it is this one that must have gone.
                living = await broker.connection.execute("ZCARD", f"ps:{{{MODEL}/0}}:gateways")
                is_noted = await broker.connection.execute("HEXISTS", f"ps:{{{MODEL}/0}}:meta", "deserted")
                return bool(is_noted) and living == 0

            await eventually(deserted)
            async with GatewaySession(broker, "tool", serves=False) as tool:
                copy = spec(grace_ms=GRACE_MS, on_disconnect=ON_DISCONNECT_CONTINUE)
                await tool.accept(copy)
                [second] = await engine.claim()
                reading = asyncio.create_task(read_all(tool, copy.request_id))
                await engine.generate(second, 2, finish=True)
                assert numbers(await reading) == [100, 101]
                await pause(4 * GRACE_MS)
                assert not await finished(broker, request.request_id)
                rest = dataclasses.replace(claim, next_index=1, digest=digest)
                await engine.generate(rest, 2, finish=True)
                assert numbers(await read_all(tool, request.request_id)) == [100, 101]
                assert await broker.connection.execute("ZCARD", f"ps:{{{MODEL}/0}}:gateways") == 0


async def test_graces_don_t_count_while_no_gateway_lives(broker: Broker) -> None:
    async with worker(broker) as engine:
        async with GatewaySession(broker) as gateway:
            request = spec(grace_ms=GRACE_MS)
            await gateway.accept(request)
            [claim] = await engine.claim()
            await engine.generate(claim, 1)
            reading = gateway.read(request.request_id, tenant=TENANT)
            await anext(reading)
            await die(gateway)
            prefix = f"ps:{{{MODEL}/0}}:"

            async def deserted() -> bool:
                return bool(await broker.connection.execute("HEXISTS", prefix + "meta", "deserted"))

            await eventually(deserted)
            await pause(4 * GRACE_MS)
            assert not await finished(broker, request.request_id)
            async with GatewaySession(broker):
                await eventually(lambda: finished(broker, request.request_id))
            await reading.aclose()


async def test_a_gateway_that_was_taken_for_dead_registers_again(broker: Broker) -> None:
    async with GatewaySession(broker) as other, GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec(grace_ms=2000)
        await gateway.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 1)
        async with aclosing(gateway.read(request.request_id, tenant=TENANT)) as batches:
            await anext(batches)
            await gateway.heartbeat.stop()
            await gateway.readers.timer.stop()
            prefix = f"ps:{{{MODEL}/0}}:"

            async def in_grace() -> bool:
                return bool(await broker.connection.execute("ZCARD", prefix + "graces"))

            async def out_of_grace() -> bool:
                return not await in_grace()

            await eventually(in_grace)
            gateway.heartbeat.start()
            gateway.readers.start()
            await eventually(out_of_grace)
            await pause(FAST.lease_ms)
            assert not await finished(broker, request.request_id)
        assert other.gateway_id
