"""A request that has tokens goes on where tokens are computed as before: on engines with an equal fingerprint."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pagestream_streams import Broker, EngineSession, GatewaySession
from pagestream_streams.connection.scripts import REGISTRY
from support.protocol.token_streams import FAST, MODEL, TENANT, Worker, eventually, numbers, read_all, spec

OLD, NEW = "0123456789abcdef", "fedcba9876543210"


@asynccontextmanager
async def engine_of(broker: Broker, fingerprint: str, name: str = "engine") -> AsyncIterator[Worker]:
    lost: list[str] = []
    async with EngineSession(
        broker, model=MODEL, engine_id=name, on_lost=lost.extend, fingerprint=fingerprint
    ) as session:
        yield Worker(session, lost)


async def begun_on(broker: Broker, gateway: GatewaySession, fingerprint: str, tokens: int) -> str:
    """A request that an engine of this fingerprint has brought so far and handed back."""
    request = spec()
    await gateway.accept(request)
    async with engine_of(broker, fingerprint) as engine:
        [claim] = await engine.claim()
        await engine.generate(claim, tokens)
    return request.request_id


async def test_only_an_equal_one_goes_on_with_tokens(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        request_id = await begun_on(broker, gateway, OLD, 3)
        async with engine_of(broker, NEW, "new") as new, engine_of(broker, OLD, "old") as old:
            fresh = spec()
            await gateway.accept(fresh)
            [claim] = await new.claim()
            assert claim.request_id == fresh.request_id, "what goes on comes first, but not to this engine"
            assert await new.session.claim(max_requests=9, max_prompt_tokens=1000) == []
            [claim] = await old.claim()
            assert (claim.request_id, claim.next_index) == (request_id, 3)
            await old.generate(claim, 5, finish=True)
        assert (await broker.view(request_id, TENANT)).fingerprint == OLD
        assert numbers(await read_all(gateway, request_id)) == list(range(100, 105))


async def test_any_goes_on_without_tokens(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        request_id = await begun_on(broker, gateway, OLD, 0)
        async with engine_of(broker, NEW) as engine:
            [claim] = await engine.claim()
            assert claim.request_id == request_id


async def test_an_unknown_one_goes_with_any(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        for first, second in ((OLD, ""), ("", NEW)):
            request_id = await begun_on(broker, gateway, first, 2)
            async with engine_of(broker, second) as engine:
                [claim] = await engine.claim()
                assert claim.request_id == request_id
                await engine.generate(claim, 3, finish=True)


async def test_after_its_time_any_will_do_and_is_the_one_to_match(redis_url: str, broker: Broker) -> None:
    hasty = dataclasses.replace(FAST, fingerprint_grace_ms=200)
    async with GatewaySession(broker) as gateway, await Broker.connect(redis_url, hasty) as impatient:
        request_id = await begun_on(broker, gateway, OLD, 2)
        async with engine_of(impatient, NEW) as engine:
            assert await engine.session.claim(max_requests=1, max_prompt_tokens=1000) == []
            [claim] = await engine.claim()
            assert (claim.request_id, claim.next_index) == (request_id, 2)
        async with engine_of(broker, OLD, "old") as old, engine_of(broker, NEW, "new") as new:
            assert await old.session.claim(max_requests=1, max_prompt_tokens=1000) == []
            [claim] = await new.claim()
            assert claim.request_id == request_id


async def test_its_own_queue_ends_with_it_and_counts_as_queued(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        request_id = await begun_on(broker, gateway, OLD, 2)
        where = await broker.directory.locate(request_id)
        await eventually(lambda: gateway.acceptor.placer.queued.get(where) == 1)
        queue = f"{where.prefix}queue:resume:{OLD}"
        assert await broker.connection.execute("XLEN", queue) == 1
        async with engine_of(broker, OLD) as engine:
            [claim] = await engine.claim()
            await engine.generate(claim, 3, finish=True)
            await engine.session.claim(max_requests=1, max_prompt_tokens=1000)

            async def is_gone() -> bool:
                await engine.session.claim(max_requests=1, max_prompt_tokens=1000)
                return not await broker.connection.execute("EXISTS", queue)

            await eventually(is_gone)


async def test_what_needs_a_longer_context_waits_for_an_engine_that_has_it(redis_url: str, broker: Broker) -> None:
    """While a longer context is rolled out, requests are accepted that old engines would have to refuse."""
    async with GatewaySession(broker) as gateway:
        long = spec(prompt=[1] * 50)
        await gateway.accept(long)
        short = spec(partition=1)
        await gateway.accept(short)
        async with of_context(broker, 50) as old, of_context(broker, 51) as new:
            [claim] = await old.claim()
            assert claim.request_id == short.request_id
            await broker.cancel(short.request_id, TENANT)
            where = await broker.directory.locate(long.request_id)
            assert await old.session.claimer.claim_from(where, 9, 1000) == []
            [claim] = await new.claim()
            assert claim.request_id == long.request_id
            await new.generate(claim, 1)
            await new.session.hand_back([claim.request_id])
            assert await old.session.claimer.claim_from(where, 9, 1000) == [], "nor does it go on there"
    hasty = dataclasses.replace(FAST, fingerprint_grace_ms=200)
    async with await Broker.connect(redis_url, hasty) as impatient, of_context(impatient, 50) as old:
        [claim] = await old.claim()
        assert claim.request_id == long.request_id, "no other engine came: its own reports the error"


async def test_many_that_need_a_longer_context_hide_none_behind_them(broker: Broker) -> None:
    """However often it claims, an engine gets all that it holds, in order, and none of the others."""
    async with GatewaySession(broker) as gateway, of_context(broker, 50) as short:
        fitting = []
        for number in range(44):
            if number < 40:
                await gateway.accept(spec(prompt=[1] * 60))
            if number == 20 or number >= 40:
                fitting.append(spec())
                await gateway.accept(fitting[-1])
        claims = await short.claim(2)
        assert [claim.request_id for claim in claims] == [each.request_id for each in fitting[:2]]
        claims = await short.claim(3)
        assert [claim.request_id for claim in claims] == [each.request_id for each in fitting[2:]]
        assert await short.session.claim(max_requests=9, max_prompt_tokens=1000) == []


@asynccontextmanager
async def of_context(broker: Broker, max_model_len: int) -> AsyncIterator[Worker]:
    async with EngineSession(
        broker, model=MODEL, engine_id="engine", on_lost=lambda _: None, max_model_len=max_model_len
    ) as session:
        yield Worker(session)


@asynccontextmanager
async def registered_again(broker: Broker, engine: Worker) -> AsyncIterator[None]:
    """Do what a heartbeat does that began before the engine retired, and is slow."""
    identity, is_over = engine.session.identity, asyncio.Event()

    async def register() -> None:
        while not is_over.is_set():
            await broker.connection.run(REGISTRY, identity.keyspace.engines(MODEL), identity.engine_id, 1000)

    task = asyncio.create_task(register())
    try:
        yield
    finally:
        is_over.set()
        await task


async def test_of_engines_that_retire_together_the_last_keeps_its_requests(broker: Broker) -> None:
    async with (
        engine_of(broker, NEW, "new") as new,
        engine_of(broker, OLD, "one") as one,
        engine_of(broker, OLD, "two") as two,
    ):
        for engine in (new, one, two):
            await engine.session.heartbeat.beat()
        async with registered_again(broker, one), registered_again(broker, two):
            assert not await one.session.retire(), "another goes on with its requests"
            assert await two.session.retire(), "the other one like it takes nothing any more"
