"""Clocks that go back, servers that are full, keys that got lost, heads that are too large: time and claims go on."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED, REQUEST_STATE_FINISHED
from pagestream_streams import Broker, EngineSession, GatewaySession
from pagestream_streams.connection.scripts import REGISTER
from pagestream_streams.errors import RequestNotFound
from pagestream_streams.protocol.keys import Partition
from support.protocol.token_streams import (
    FAST,
    MODEL,
    TENANT,
    append_of,
    card,
    ending,
    eventually,
    read_all,
    spec,
    worker,
)
from support.redis.topologies import Place, ask_all

HERE = Partition(MODEL, 0)


@pytest.fixture
async def memory(redis_server: Place) -> AsyncIterator[Callable[[int], object]]:
    """Sets how many bytes Redis may use: with one it refuses all that needs memory, with 0 nothing."""
    yield lambda amount: ask_all(redis_server, "CONFIG", "SET", "maxmemory", amount)
    ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)


async def test_requests_are_claimed_although_redis_clock_has_gone_back(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        seconds, _ = await broker.connection.execute("TIME")
        queue, later = f"{HERE.prefix}queue:0", f"{(int(seconds) + 3600) * 1000}-0"
        # What an entry leaves that came and went before the clock was set back by an hour.
        await broker.connection.execute("XADD", queue, later, "id", "x", "t", 1)
        await broker.connection.execute("XDEL", queue, later)
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        assert claim.request_id == request.request_id


async def test_a_full_redis_still_ends_requests_whose_deadline_passes(
    broker: Broker, memory: Callable[[int], object]
) -> None:
    async with GatewaySession(broker) as gateway:
        request = spec(deadline_ms=300)
        await gateway.accept(request)
        memory(1)

        async def is_over() -> bool:
            return (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_FINISHED

        await eventually(is_over)


async def test_a_full_redis_robs_no_living_engine(broker: Broker, memory: Callable[[int], object]) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        await engine.claim()
        memory(1)
        before = float(await broker.connection.execute("ZSCORE", f"{HERE.prefix}leases", engine.session.engine_id))

        async def is_renewed() -> bool:
            lease = await broker.connection.execute("ZSCORE", f"{HERE.prefix}leases", engine.session.engine_id)
            return float(lease) > before + 2 * FAST.lease_ms

        await eventually(is_renewed)
        memory(0)
        assert engine.lost == []
        assert (await broker.view(request.request_id, TENANT)).attempts == 1


async def test_a_lost_model_card_is_published_again_by_its_engine(broker: Broker, redis_server: Place) -> None:
    async with EngineSession(broker, model=MODEL, on_lost=lambda _: None, card=card(MODEL)) as session:
        ask_all(redis_server, "FLUSHALL")

        async with GatewaySession(broker) as gateway:
            request = spec(partition=1)

            async def is_accepted() -> bool:
                try:
                    return await gateway.accept(request)
                except RequestNotFound:
                    return False

            await eventually(is_accepted)
            assert [(info.name, info.partitions) for info in await broker.models()] == [(MODEL, 2)]
            claims = []
            while not claims:
                claims = await session.claim(max_requests=1, max_prompt_tokens=100)
                await session.wait_for_work(0.05)
            assert claims[0].request_id == request.request_id


async def test_an_entry_that_somebody_else_read_is_a_head_like_any_other(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        first, second = spec(), spec()
        await gateway.accept(first)
        await gateway.accept(second)
        queue = f"{HERE.prefix}queue:0"
        await broker.connection.execute("XREADGROUP", "GROUP", "engines", "by hand", "STREAMS", queue, ">")
        async with worker(broker) as engine:
            claims = await engine.claim(2)
            assert {claim.request_id for claim in claims} == {first.request_id, second.request_id}
        assert await broker.connection.execute("XLEN", queue) == 0


async def test_a_large_head_gets_what_becomes_free_before_others_do(redis_url: str) -> None:
    aged = dataclasses.replace(FAST, ageing_ms=50)
    async with await Broker.connect(redis_url, aged) as broker:
        await broker.publish_model(card(MODEL), partitions=2)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            session = engine.session
            await eventually(lambda: len(session.assignment.own) == 2)
            large = spec(prompt=range(1, 81))
            await gateway.accept(large)
            running = []
            for turn in range(200):
                await gateway.accept(spec(partition=1, prompt=range(1, 21)))
                free = 100 - sum(len(claim.spec.prompts[0].ids) for claim in running)
                running += await session.claim(max_requests=9, max_prompt_tokens=free) if free else []
                if any(claim.request_id == large.request_id for claim in running):
                    break
                if turn > 3:
                    done = running.pop(0) if running else None
                    if done is not None:
                        entries = ending("", count=0)
                        await session.append([append_of(done, 0, entries)])
                await session.wait_for_work(0.01)
            assert any(claim.request_id == large.request_id for claim in running)


async def test_a_claim_knows_what_earlier_ones_had_from_a_cache(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        assert claim.cached_tokens == 0
        entries = ending("", count=0)[:1]
        await engine.session.append([append_of(claim, 0, entries, cached_tokens=32)])
        await engine.session.hand_back([claim.request_id])
        [again] = await engine.claim()
        assert again.cached_tokens == 32


async def test_a_record_that_cannot_be_read_fails_alone(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        good, bad = spec(), spec()
        for request in (bad, good):
            await gateway.accept(request)
        await broker.connection.execute("HSET", f"{HERE.prefix}req:{bad.request_id}", "spec", b"\xff\xff")
        [claim] = await engine.claim()
        assert claim.request_id == good.request_id
        [end] = [entry for entry in await read_all(gateway, bad.request_id) if entry.HasField("end")]
        assert end.end.error.code == "corrupt_record"


async def test_a_log_that_cannot_be_read_fails_alone(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        await engine.generate(claim, 2)
        await engine.session.hand_back([request.request_id])
        log = HERE.log(request.request_id)
        await broker.connection.execute("XADD", log, "3-0", "c", "0", "t", "no number", "x", "", "d", "d")
        key = f"{HERE.prefix}req:{request.request_id}"
        await broker.connection.execute("HSET", key, "next", 3, "digest", "d")
        other = spec()
        await gateway.accept(other)
        [claim] = await engine.claim()
        assert claim.request_id == other.request_id
        assert await broker.connection.execute("HGET", key, "reason") == b"error"


async def test_an_engine_that_ends_hands_back_a_claim_that_it_never_heard_of(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        request = spec()
        async with worker(broker, "first") as engine:
            await gateway.accept(request)
            # The script runs although its caller has gone.
            await engine.session.claimer.claim_from(HERE, 1, 1000)
            assert request.request_id not in engine.session.active_requests
        async with worker(broker, "second") as engine:
            [claim] = await engine.claim()
            assert (claim.request_id, claim.attempts) == (request.request_id, 2)
        view = await broker.view(request.request_id, TENANT)
        assert view.attempts == 2


async def test_a_registration_that_came_too_late_is_taken_back_and_the_grace_starts(broker: Broker) -> None:
    async with GatewaySession(broker) as other, GatewaySession(broker) as gateway:
        request = spec(grace_ms=100)
        await other.accept(request)
        # As an accept leaves it whose caller had given up before its script ran.
        await broker.connection.run(
            REGISTER, HERE.prefix, request.request_id, TENANT, gateway.gateway_id, FAST.lease_ms
        )

        async def is_abandoned() -> bool:
            return (await broker.view(request.request_id, TENANT)).finish_reason == FINISH_REASON_CANCELLED

        await eventually(is_abandoned)


async def test_a_lost_registration_is_made_again_although_another_one_hides_it(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request, stranger = spec(), spec()
        await gateway.accept(request)
        reading = asyncio.create_task(read_all(gateway, request.request_id))
        key = HERE.reads(gateway.gateway_id)

        async def is_registered() -> bool:
            return bool(await broker.connection.execute("SISMEMBER", key, request.request_id))

        await eventually(is_registered)
        [claim] = await engine.claim()
        await broker.connection.execute("SREM", key, request.request_id)
        await broker.connection.execute("HSET", f"{HERE.prefix}req:{request.request_id}", "readers", "")
        await broker.connection.execute("SADD", key, stranger.request_id)
        await eventually(is_registered)
        await engine.generate(claim, 2, finish=True)
        await reading
