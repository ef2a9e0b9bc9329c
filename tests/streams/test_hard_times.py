"""Clocks that go back, keys that got lost, heads that are too large, a Redis at its memory limit: claims go on."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED, REQUEST_STATE_FINISHED
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_streams import (
    Broker,
    Claim,
    EngineSession,
    GatewaySession,
    RequestNotFound,
    StorageFull,
    StreamsSettings,
    scripts,
)
from pagestream_streams.protocol import Partition
from support.protocol.token_streams import (
    CALM,
    FORGETFUL,
    MODEL,
    TENANT,
    append_of,
    card,
    ending,
    eventually,
    lapse,
    numbers,
    read_all,
    spec,
    worker,
)
from support.redis.topologies import Place, Topology, ask_all

pytestmark = pytest.mark.served

HERE = Partition(MODEL, 0)
Memory = Callable[[int], object]


@pytest.fixture
async def memory(redis_server: Place) -> AsyncIterator[Memory]:
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


async def test_a_full_redis_still_ends_requests_whose_deadline_passes(broker: Broker, memory: Memory) -> None:
    async with GatewaySession(broker) as gateway:
        request = spec(deadline_ms=300)
        await gateway.accept(request)
        memory(1)

        async def is_over() -> bool:
            return (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_FINISHED

        await eventually(is_over)


async def test_a_full_redis_robs_no_living_engine(broker: Broker, memory: Memory) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        await engine.claim()
        memory(1)
        before = float(await broker.connection.execute("ZSCORE", f"{HERE.prefix}leases", engine.session.engine_id))

        async def is_renewed() -> bool:
            lease = await broker.connection.execute("ZSCORE", f"{HERE.prefix}leases", engine.session.engine_id)
            return float(lease) > before

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

            async def is_listed() -> bool:
                return [(info.name, info.partitions) for info in await broker.models()] == [(MODEL, 2)]

            await eventually(is_accepted)
            await eventually(is_listed)
            claims: list[Claim] = []
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
    aged = dataclasses.replace(CALM, ageing_ms=50)
    async with await Broker.connect(redis_url, aged) as broker:
        await broker.publish_model(card(MODEL), partitions=2)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            session = engine.session
            await eventually(lambda: len(session.assignment.own) == 2)
            large = spec(prompt=range(1, 81))
            await gateway.accept(large)
            running: list[Claim] = []
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
            assert request.request_id not in engine.session.held
        async with worker(broker, "second") as engine:
            [claim] = await engine.claim()
            assert (claim.request_id, claim.attempts) == (request.request_id, 2)
        view = await broker.view(request.request_id, TENANT)
        assert view.attempts == 2


async def test_a_registration_that_came_too_late_is_taken_back_and_the_grace_starts(
    broker: Broker, redis_url: str
) -> None:
    async with (
        await Broker.connect(redis_url, FORGETFUL) as forgetful,
        GatewaySession(forgetful) as other,
        GatewaySession(broker) as gateway,
    ):
        request = spec(grace_ms=100)
        await other.accept(request)
        # As an accept leaves it whose caller had given up before its script ran.
        await broker.connection.run(
            scripts.REGISTER, HERE.prefix, request.request_id, TENANT, gateway.gateway_id, CALM.lease_ms
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


# -- Redis at its memory limit (`maxmemory`): what was accepted is kept, read, joined, cancelled and ended.


GRACE_MS = 100


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
        request = spec(grace_ms=60_000)
        await stalled.accept(request)
        seen: list[LogEntry] = []
        reading = asyncio.create_task(read_into(seen, stalled, request))
        [claim] = await engine.claim()
        await engine.generate(claim, 1)
        await eventually(lambda: len(seen) == 1)
        await stalled.heartbeat.stop()
        await lapse(broker, stalled)
        memory(1)

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


async def test_graces_begin_anew_when_there_is_room_again(redis_url: str, broker: Broker, memory: Memory) -> None:
    async with await Broker.connect(redis_url, FORGETFUL) as forgetful, GatewaySession(forgetful) as gateway:
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
    settings = dataclasses.replace(waits_of(redis_server), wait_timeout_ms=20_000)
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
        return dataclasses.replace(CALM, wait_replicas=1)
    return dataclasses.replace(CALM, wait_fsync=place.binary.version >= (7, 2))
