"""The claim: one script, classes that age, partitions that have an owner, contexts and fingerprints that fit."""

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from pagestream.v1.inference_pb2 import REQUEST_STATE_RUNNING
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import Broker, Claim, EngineSession, GatewaySession, RequestView, scripts
from pagestream_streams.admin import read_owners
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import (
    CALM,
    MODEL,
    TENANT,
    Worker,
    card,
    eventually,
    numbers,
    read_all,
    spec,
    worker,
)

pytestmark = pytest.mark.served


async def view(broker: Broker, request_id: str) -> RequestView:
    return await broker.view(request_id, TENANT)


async def test_claim_takes_the_entry_and_names_the_owner_in_one_step(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec(deadline_ms=60_000)
        await gateway.accept(request)
        assert (await view(broker, request.request_id)).queue_position == 0
        [claim] = await engine.claim()
        assert (claim.spec, claim.epoch, claim.next_index, claim.digest, claim.attempts) == (request, 1, 0, "", 1)
        loop_time = asyncio.get_running_loop().time()
        assert claim.deadline is not None
        assert loop_time < claim.deadline < loop_time + 61
        seen = await view(broker, request.request_id)
        assert (seen.state, seen.queue_position, seen.attempts) == (REQUEST_STATE_RUNNING, None, 1)
        prefix = f"ps:{{{MODEL}/0}}:"
        execute = broker.connection.execute
        assert await execute("XLEN", prefix + "queue:0") == 0
        assert (await execute("XPENDING", prefix + "queue:0", "engines"))["pending"] == 0
        owned = await execute("SMEMBERS", f"{prefix}owned:{engine.session.engine_id}")
        assert owned == {request.request_id.encode()}
        queued = spec()
        await gateway.accept(queued)
        assert await read_owners(broker, [queued.request_id, request.request_id]) == ["", engine.session.engine_id]


async def test_each_request_goes_to_one_engine(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker, "a") as a, worker(broker, "b") as b:
        wanted = [spec(partition=i % 2) for i in range(40)]
        await asyncio.gather(*(gateway.accept(request) for request in wanted))
        claims: list[Claim] = []
        while len(claims) < 40:
            for found in await asyncio.gather(
                *(each.session.claim(max_requests=3, max_prompt_tokens=1000) for each in (a, b, a, b))
            ):
                claims += found
        assert sorted(claim.request_id for claim in claims) == sorted(request.request_id for request in wanted)


async def test_budget_of_prompt_tokens_is_kept(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        for size in (4, 4, 4):
            await gateway.accept(spec(prompt=range(size)))
        claims = await engine.session.claim(max_requests=10, max_prompt_tokens=9)
        assert len(claims) == 2
        assert await engine.session.claim(max_requests=10, max_prompt_tokens=3) == []
        assert len(await engine.claim()) == 1


async def test_queue_position_counts_those_before(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway:
        requests = [spec() for _ in range(3)]
        for request in requests:
            await gateway.accept(request)
        await broker.cancel(requests[0].request_id, TENANT)
        places = [(await view(broker, request.request_id)).queue_position for request in requests]
        assert places == [None, 0, 1]


class TestClasses:
    async def test_higher_class_first_and_what_was_handed_back_before_all(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            begun = spec(priority=3)
            await gateway.accept(begun)
            await engine.claim()
            low, high = spec(priority=2), spec(priority=0)
            await gateway.accept(low)
            await gateway.accept(high)
            await engine.session.hand_back([begun.request_id])
            order = [claim.request_id for claim in await engine.claim(3)]
            assert order == [begun.request_id, high.request_id, low.request_id]

    async def test_no_class_starves(self, redis_url: str, broker: Broker) -> None:
        ageing = dataclasses.replace(CALM, ageing_ms=50)
        async with (
            await Broker.connect(redis_url, ageing) as quick,
            GatewaySession(quick) as gateway,
            worker(quick) as engine,
        ):
            # The later one of two is never the older one, so that the first claim does not depend on how long it takes.
            high, low = spec(priority=0), spec(priority=2)
            await gateway.accept(high)
            await gateway.accept(low)
            order = [claim.request_id for claim in await engine.claim(1)]
            assert order == [high.request_id]
            async with asyncio.timeout(LIMIT_S):
                while low.request_id not in order:
                    await gateway.accept(spec(priority=0))
                    await gateway.accept(spec(priority=0))
                    order += [claim.request_id for claim in await engine.claim(1)]


async def test_others_partitions_are_taken_from_when_their_entries_age(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker, "busy"), worker(broker, "idle") as idle:
        for partition in (0, 1):
            await gateway.accept(spec(partition=partition))
        assert len(await idle.claim(2)) == 2


async def test_partitions_of_a_dead_engine_find_an_owner(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker, "b") as b:
        async with worker(broker, "a"):
            assert [info.engines for info in await broker.models()] == [2]
        assert [info.engines for info in await broker.models()] == [1]
        for partition in (0, 1):
            await gateway.accept(spec(partition=partition))
        assert len(await b.claim(2)) == 2


async def test_doorbell_wakes_an_idle_engine(broker: Broker) -> None:
    """The wait has no limit of its own here: without the bell the test times out."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        await engine.session.claim(max_requests=1, max_prompt_tokens=100)
        await engine.session.wait_for_work(0.5)
        assert await engine.session.claim(max_requests=1, max_prompt_tokens=100) == []
        waiting = asyncio.create_task(engine.session.wait_for_work(1000))
        await asyncio.sleep(0)
        await gateway.accept(spec())
        await asyncio.wait_for(waiting, LIMIT_S)
        assert len(await engine.claim()) == 1


async def test_stealing_moves_the_coldest(redis_url: str) -> None:
    """What its engine has cached is left to it for longer than what came later and is cached nowhere."""
    settings = dataclasses.replace(CALM, steal_held_us=100_000, steal_held_most_ms=600_000, steal_idle_ms=600_000)
    async with await Broker.connect(redis_url, settings) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=2)
        async with worker(broker) as one, worker(broker) as other:
            await one.session.lease.beat()
            await gateway.acceptor.engines.read([MODEL], 5.0)
            ids_of = [await gateway.place(MODEL, range(1000), TENANT)]
            gateway.acceptor.placer.queued.clear()  # as if its engine were not late
            ids_of.append(await gateway.place(MODEL, range(1000), TENANT))
            for request_id in reversed(ids_of):  # the second one was placed where the first one is computed
                request = spec()
                request.request_id = request_id
                await gateway.accept(request)
            where = await broker.directory.locate(ids_of[0])
            assert where == await broker.directory.locate(ids_of[1])
            [owner] = [each for each in (one, other) if where.number in each.session.assignment.own]
            thief = other if owner is one else one
            [stolen] = await thief.claim()
            assert stolen.request_id == ids_of[0]
            assert await thief.session.claim(max_requests=1, max_prompt_tokens=1000) == []
            [kept] = await owner.claim()
            assert kept.request_id == ids_of[1]


async def accept_cached(gateway: GatewaySession, count: int) -> list[str]:
    """Accept requests that are left for ten minutes to the engine which has their prompt; return their ids."""
    await gateway.acceptor.engines.read([MODEL], 60.0)
    await gateway.place(MODEL, range(1000), TENANT)
    found = []
    for _ in range(count):
        gateway.acceptor.placer.queued.clear()  # as if its engine were not late
        request = spec()
        request.request_id = await gateway.place(MODEL, range(1000), TENANT)
        await gateway.accept(request)
        found.append(request.request_id)
    return found


LEFT = dataclasses.replace(
    CALM, steal_held_us=1_000_000, steal_held_most_ms=600_000, steal_idle_ms=600_000, steal_after_ms=1
)


async def test_engines_beyond_the_partitions_take_what_is_cached_elsewhere(redis_url: str) -> None:
    async with await Broker.connect(redis_url, LEFT) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=1)
        async with worker(broker) as one, worker(broker) as other:
            await one.session.lease.beat()
            [spare] = [each for each in (one, other) if not each.session.assignment.own]
            accepted = await accept_cached(gateway, 1)
            assert [each.request_id for each in await spare.claim()] == accepted


async def test_an_engine_takes_its_own_before_what_is_cached_elsewhere_and_that_before_it_stands_idle(
    redis_url: str,
) -> None:
    settings = dataclasses.replace(LEFT, steal_idle_ms=1)
    async with await Broker.connect(redis_url, settings) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=2)
        async with worker(broker) as one, worker(broker) as other:
            await one.session.lease.beat()
            cached = await accept_cached(gateway, 1)
            where = await broker.directory.locate(cached[0])
            [thief] = [each for each in (one, other) if where.number not in each.session.assignment.own]
            [mine] = thief.session.assignment.own
            await asyncio.sleep(0.2)  # more than what counts as the same time
            later = spec(partition=mine)
            await gateway.accept(later)
            thief.session.claim_order.forget()
            assert [each.request_id for each in await thief.claim()] == [later.request_id]
            assert [each.request_id for each in await thief.claim()] == cached


@pytest.mark.parametrize("policy", ["oldest", "fair"])
async def test_a_look_passes_few_cached_entries_and_reads_no_records(redis_url: str, policy: str) -> None:
    still = dataclasses.replace(LEFT, heartbeat_ms=30_000, sweep_ms=30_000)  # their commands would count
    async with await Broker.connect(redis_url, still) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=1)
        session = EngineSession(broker, model=MODEL, on_lost=lambda _: None, policy=policy, max_model_len=8192)
        async with session:
            await accept_cached(gateway, 40)
            await gateway.accept(spec(partition=0))
            await asyncio.sleep(0.05)
            where = (await broker.directory.all_partitions(MODEL))[0]
            before = await num_commands(broker, "hget"), await num_commands(broker, "xrange")
            look = ("thief:1", "n", 0, 10**6, 1, 30_000, 1500, 10_000, 0, "", 30_000, 6000, 0, 8192, 0, "", "", 30_000)
            reply = await broker.connection.run(scripts.CLAIM, where.prefix, *look)
            assert await num_commands(broker, "hget") - before[0] < 16  # of heartbeats
            assert await num_commands(broker, "xrange") - before[1] < 36
            assert len(reply[1]) == 4  # no head: the one behind them is not looked for


async def num_commands(broker: Broker, name: str) -> int:
    """Return how often the server has run a command."""
    text = str(await broker.connection.execute("INFO", "commandstats"))
    found = re.search(rf"cmdstat_{name}\W+(?:\{{'calls': |calls=)(\d+)", text)
    return int(found[1]) if found else 0


# -- Engines of one model hold contexts of different lengths: what the card says, and who runs what.


HASTY = dataclasses.replace(CALM, fingerprint_grace_ms=100)


@pytest_asyncio.fixture
async def hasty(redis_url: str, broker: Broker) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, HASTY) as connected:
        yield connected


@asynccontextmanager
async def of_context(broker: Broker, max_model_len: int) -> AsyncIterator[Worker]:
    async with EngineSession(
        broker, model=MODEL, engine_id="engine", on_lost=lambda _: None, max_model_len=max_model_len
    ) as session:
        yield Worker(session)


def needing(tokens: int, *, prompt: int = 5) -> RequestSpec:
    request = spec(prompt=[1] * prompt)
    request.sampling.max_tokens = tokens - prompt
    return request


async def said(broker: Broker) -> tuple[int, int]:
    card = await broker.directory.card(MODEL)
    return card.max_model_len, card.default_model_len


async def test_a_request_is_run_by_an_engine_that_holds_all_of_it(hasty: Broker) -> None:
    async with (
        GatewaySession(hasty) as gateway,
        of_context(hasty, 60) as small,
    ):
        async with of_context(hasty, 100) as large:
            await small.session.lease.beat()
            long, short = needing(61), needing(60)
            await gateway.accept(long)
            await gateway.accept(short)
            where = await hasty.directory.locate(long.request_id)

            async def waited() -> bool:
                seconds, micros = await hasty.connection.execute("TIME")
                accepted = await hasty.connection.execute("HGET", where.request(long.request_id), "accepted")
                return int(seconds) * 1000 + int(micros) // 1000 > int(accepted) + 2 * HASTY.fingerprint_grace_ms

            await eventually(waited)
            [claim] = await small.session.claimer.claim_from(where, 9, 1000)
            assert claim.request_id == short.request_id, "however long the other waits, an engine lives that holds it"
            [claim] = await large.session.claimer.claim_from(where, 9, 1000)
            assert claim.request_id == long.request_id
            await large.session.hand_back([claim.request_id])
        await small.session.lease.beat()

        async def ends_it() -> bool:
            claims = await small.session.claimer.claim_from(where, 9, 1000)
            return long.request_id in {claim.request_id for claim in claims}

        await eventually(ends_it)


async def test_the_card_says_the_longest_and_what_most_hold(hasty: Broker) -> None:
    async with of_context(hasty, 60):
        await eventually(lambda: _says(hasty, 60, 0))
        async with of_context(hasty, 100) as large:
            await large.session.lease.beat()
            assert await said(hasty) == (100, 60), "it grows at once"
            async with of_context(hasty, 10) as tiny:
                await tiny.session.lease.beat()
                assert await said(hasty) == (100, 60), "it shortens no other answers"
                await hasty.publish_model(await hasty.directory.card(MODEL))
                assert await said(hasty) == (100, 60), "nor does another publication"
        await eventually(lambda: _says(hasty, 60, 0))


async def _says(broker: Broker, longest: int, default: int) -> bool:
    return await said(broker) == (longest, default)


# -- A request that has tokens goes on where tokens are computed as before: on engines with an equal fingerprint.


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
    hasty = dataclasses.replace(CALM, fingerprint_grace_ms=200)
    async with GatewaySession(broker) as gateway, await Broker.connect(redis_url, hasty) as impatient:
        request_id = await begun_on(broker, gateway, OLD, 2)
        async with engine_of(broker, NEW) as patient, engine_of(impatient, NEW) as engine:
            assert await patient.session.claim(max_requests=1, max_prompt_tokens=1000) == []
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
    hasty = dataclasses.replace(CALM, fingerprint_grace_ms=200)
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
async def registered_again(broker: Broker, engine: Worker) -> AsyncIterator[None]:
    """Do what a heartbeat does that began before the engine retired, and is slow."""
    identity, is_over = engine.session.identity, asyncio.Event()

    async def register() -> None:
        while not is_over.is_set():
            await broker.connection.run(scripts.REGISTRY, identity.keyspace.engines(MODEL), identity.engine_id, 1000)

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
            await engine.session.lease.beat()
        async with registered_again(broker, one), registered_again(broker, two):
            assert not await one.session.retire(), "another goes on with its requests"
            assert await two.session.retire(), "the other one like it takes nothing any more"
