"""The claim: one script, classes that age, and partitions that have an owner."""

import asyncio
import dataclasses
import re

import pytest
from pagestream.v1.inference_pb2 import REQUEST_STATE_RUNNING
from pagestream_streams import Broker, EngineSession, GatewaySession, RequestView
from pagestream_streams.admin.ownership import read_owners
from pagestream_streams.connection.scripts import CLAIM
from pagestream_streams.gateway.placing import Placed
from support.protocol.token_streams import FAST, MODEL, TENANT, card, spec, worker


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
        claims = []
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
        ageing = dataclasses.replace(FAST, ageing_ms=50)
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
            async with asyncio.timeout(20):
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
        await asyncio.wait_for(waiting, 20)
        assert len(await engine.claim()) == 1


async def test_stealing_moves_the_coldest(redis_url: str) -> None:
    """What its engine has cached is left to it for longer than what came later and is cached nowhere."""
    settings = dataclasses.replace(FAST, steal_held_us=100_000, steal_held_most_ms=600_000, steal_idle_ms=600_000)
    async with await Broker.connect(redis_url, settings) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=2)
        async with worker(broker) as one, worker(broker) as other:
            await one.session.heartbeat.beat()
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


async def accept_cached(broker: Broker, gateway: GatewaySession, partition: int, count: int) -> list[str]:
    """Accept requests that are left to the engine of a partition for ten minutes; return their ids."""
    found = []
    for _ in range(count):
        request = spec(partition=partition)
        placed = Placed(MODEL, "its engine", partition, new_tokens=0, held_tokens=10_000, reading=0)
        gateway.acceptor.note_placed(request.request_id, placed)
        await gateway.accept(request)
        found.append(request.request_id)
    return found


LEFT = dataclasses.replace(
    FAST, steal_held_us=1_000_000, steal_held_most_ms=600_000, steal_idle_ms=600_000, steal_after_ms=1
)


async def test_engines_beyond_the_partitions_take_what_is_cached_elsewhere(redis_url: str) -> None:
    async with await Broker.connect(redis_url, LEFT) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=1)
        async with worker(broker) as one, worker(broker) as other:
            await one.session.heartbeat.beat()
            [spare] = [each for each in (one, other) if not each.session.assignment.own]
            accepted = await accept_cached(broker, gateway, 0, 1)
            assert [each.request_id for each in await spare.claim()] == accepted


async def test_an_engine_takes_its_own_before_what_is_cached_elsewhere_and_that_before_it_stands_idle(
    redis_url: str,
) -> None:
    settings = dataclasses.replace(LEFT, steal_idle_ms=1)
    async with await Broker.connect(redis_url, settings) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=2)
        async with worker(broker) as one, worker(broker) as other:
            await one.session.heartbeat.beat()
            [theirs], [mine] = other.session.assignment.own, one.session.assignment.own
            cached = await accept_cached(broker, gateway, theirs, 1)
            await asyncio.sleep(0.2)  # more than what counts as the same time
            later = spec(partition=mine)
            await gateway.accept(later)
            one.session.claim_order.forget()
            assert [each.request_id for each in await one.claim()] == [later.request_id]
            assert [each.request_id for each in await one.claim()] == cached


@pytest.mark.parametrize("policy", ["oldest", "fair"])
async def test_a_look_passes_few_cached_entries_and_reads_no_records(redis_url: str, policy: str) -> None:
    async with await Broker.connect(redis_url, LEFT) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=1)
        session = EngineSession(broker, model=MODEL, on_lost=lambda _: None, policy=policy, max_model_len=8192)
        async with session:
            await accept_cached(broker, gateway, 0, 40)
            await gateway.accept(spec(partition=0))
            await asyncio.sleep(0.05)
            where = (await broker.directory.all_partitions(MODEL))[0]
            before = await num_commands(broker, "hget"), await num_commands(broker, "xrange")
            look = ("thief:1", "n", 0, 10**6, 1, 30_000, 1500, 10_000, 0, "", 30_000, 6000, 0, 8192, 0, "", "", 30_000)
            reply = await broker.connection.run(CLAIM, where.prefix, *look)
            assert await num_commands(broker, "hget") - before[0] < 16  # of heartbeats
            assert await num_commands(broker, "xrange") - before[1] < 36
            assert len(reply[1]) == 4  # no head: the one behind them is not looked for


async def num_commands(broker: Broker, name: str) -> int:
    """Return how often the server has run a command."""
    text = str(await broker.connection.execute("INFO", "commandstats"))
    found = re.search(rf"cmdstat_{name}\W+(?:\{{'calls': |calls=)(\d+)", text)
    return int(found[1]) if found else 0
