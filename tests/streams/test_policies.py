"""The engines' policy orders the queue: over all partitions, gateways and engines (docs/design/queueing.md)."""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from pagestream_streams import Broker, EngineSession, GatewaySession
from support.protocol.token_streams import MODEL, STILL, card, spec
from support.redis.topologies import Place, ask_all

pytestmark = pytest.mark.served

AGEING_MS = 1000
LONG_MS = 100_000  # than which no machine waits longer to accept a few requests
APART_S = 0.12  # more than claim.SLACK_MS, as are 110 tokens
PARTITIONS = 4
ALONE = pytest.mark.slow
"""Cases that differ from a first one in what a policy does not look at."""
QUIET = dataclasses.replace(STILL, steal_after_ms=0, ageing_ms=AGEING_MS, tenant_weights={"heavy": 3})


class Fleet:
    """Engines of one policy that take turns to claim one request each, and the gateways that accept for them."""

    def __init__(self, broker: Broker, gateways: Sequence[GatewaySession], engines: Sequence[EngineSession]) -> None:
        self.broker = broker
        self.gateways = gateways
        self.engines = engines
        self._num_accepted = 0

    async def accept(self, tenant: str = "a", *, tokens: int = 10, priority: int = 0, partition: int = -1) -> str:
        """Accept by the next gateway, into the next partition."""
        number = self._num_accepted
        self._num_accepted += 1
        place = number * 7 // len(self.gateways) % PARTITIONS if partition < 0 else partition
        request = spec(tenant=tenant, prompt=range(tokens), priority=priority, partition=place)
        assert await self.gateways[number % len(self.gateways)].accept(request)
        return request.request_id

    async def claim(self, count: int) -> list[str]:
        """Return the ids of the next claims, in order."""
        claimed: list[str] = []
        for number in range(count):
            engine = self.engines[number % len(self.engines)]
            engine.doorbell.ring_all()
            engine.claim_order.forget()
            claimed += [each.request_id for each in await engine.claim(max_requests=1, max_prompt_tokens=10**6)]
        return claimed


@asynccontextmanager
async def fleet(
    url: str, policy: str, *, engines: int = 1, gateways: int = 1, ageing_ms: int = AGEING_MS
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        settings = dataclasses.replace(QUIET, ageing_ms=ageing_ms)
        broker = await stack.enter_async_context(await Broker.connect(url, settings))
        await broker.publish_model(card(), partitions=PARTITIONS)
        sessions = [
            await stack.enter_async_context(EngineSession(broker, model=MODEL, on_lost=lambda _: None, policy=policy))
            for _ in range(engines)
        ]
        for session in sessions:
            await session.lease.beat()  # all of them know each other
        entries = [await stack.enter_async_context(GatewaySession(broker)) for _ in range(gateways)]
        yield Fleet(broker, entries, sessions)


@pytest.mark.parametrize("engines", [2, pytest.param(1, marks=ALONE)])
async def test_the_shortest_goes_first(redis_url: str, engines: int) -> None:
    async with fleet(redis_url, "shortest_first", engines=engines, ageing_ms=LONG_MS) as world:
        lengths = (1700, 20, 1140, 580)  # 5.6 s apart: much more than claim.SLACK_MS, and than accepting takes
        accepted = {await world.accept(tokens=tokens): tokens for tokens in lengths}
        assert [accepted[each] for each in await world.claim(len(lengths))] == sorted(lengths)


async def test_none_waits_longer_for_short_ones_than_a_class_is_worth(redis_url: str) -> None:
    async with fleet(redis_url, "shortest_first") as world:
        long = await world.accept(tokens=1000)
        soon = await world.accept(tokens=1)
        await asyncio.sleep(AGEING_MS / 1000)
        late = await world.accept(tokens=1)
        assert await world.claim(3) == [soon, long, late]


@pytest.mark.parametrize(
    ("engines", "gateways"), [(2, 2), *(pytest.param(*each, marks=ALONE) for each in ((1, 1), (1, 2), (2, 1)))]
)
async def test_one_request_waits_for_no_flood_of_another_tenant(redis_url: str, engines: int, gateways: int) -> None:
    async with fleet(redis_url, "fair", engines=engines, gateways=gateways) as world:
        for _ in range(24):
            await world.accept("flood", tokens=110)
        await world.claim(4)
        single = await world.accept("single")
        assert single in await world.claim(1 + gateways)  # one request of the flood for each gateway


@pytest.mark.parametrize("engines", [2, pytest.param(1, marks=ALONE)])
async def test_tenants_get_tokens_by_their_weights(redis_url: str, engines: int) -> None:
    async with fleet(redis_url, "fair", engines=engines) as world:
        tenants = {await world.accept("light", tokens=20): "light" for _ in range(12)}
        tenants |= {await world.accept("heavy", tokens=10): "heavy" for _ in range(24)}
        claimed = [tenants[each] for each in await world.claim(21)]
        assert abs(claimed.count("heavy") - 18) <= 2  # three times the tokens, in requests of half the size


async def test_what_a_tenant_had_while_it_was_alone_is_not_held_against_it(redis_url: str) -> None:
    async with fleet(redis_url, "fair") as world:
        for _ in range(12):
            await world.accept("early")
        await world.claim(12)
        tenants = {await world.accept("late"): "late" for _ in range(8)}
        tenants |= {await world.accept("early"): "early" for _ in range(8)}
        claimed = [tenants[each] for each in await world.claim(8)]
        assert abs(claimed.count("early") - 4) <= 1


@pytest.mark.parametrize("policy", ["fcfs", *(pytest.param(each, marks=ALONE) for each in ("priority", "round_robin"))])
async def test_the_others_go_by_arrival_and_class(redis_url: str, policy: str) -> None:
    async with fleet(redis_url, policy, engines=2) as world:
        second = await world.accept("flood", tokens=20, priority=1)
        await asyncio.sleep(APART_S)
        first = await world.accept("flood", tokens=30)
        third = await world.accept(tokens=1, priority=1)
        await asyncio.sleep(AGEING_MS / 1000 + APART_S)
        last = await world.accept(tokens=1)
        assert await world.claim(4) == [first, second, third, last]


async def test_a_full_engine_takes_the_first_class_but_not_before_what_is_older_by_a_class(redis_url: str) -> None:
    async with fleet(redis_url, "priority") as world:
        [engine] = world.engines
        low = await world.accept(priority=1, partition=0)
        early = await world.accept(partition=0)
        await asyncio.sleep(AGEING_MS / 1000 + APART_S)
        late = await world.accept(partition=0)
        assert [each.request_id for each in await engine.claim_first_class(max_requests=2)] == [early]
        [claim] = await engine.claim(max_requests=1, max_prompt_tokens=100)
        assert (claim.request_id, claim.aged_classes >= 1) == (low, True)
        assert [each.request_id for each in await engine.claim_first_class(max_requests=2)] == [late]


async def test_the_engine_that_started_last_decides(redis_url: str) -> None:
    """What waits is ranked anew; the others' beats change nothing, nor does an engine of a version without policies."""
    async with fleet(redis_url, "fcfs", ageing_ms=LONG_MS) as world:
        long, short = await world.accept(tokens=3000, partition=0), await world.accept(tokens=1, partition=0)
        await asyncio.sleep(0.002)  # a later start in ms
        async with EngineSession(world.broker, model=MODEL, on_lost=lambda _: None, policy="shortest_first"):
            await world.engines[0].lease.beat()
            async with EngineSession(world.broker, model=MODEL, on_lost=lambda _: None):
                assert await world.claim(2) == [short, long]


async def policy_of(broker: Broker) -> str:
    [where, *_] = await broker.directory.all_partitions(MODEL)
    return str((await broker.connection.execute("HGET", f"{where.prefix}meta", "policy")).decode())


async def test_an_engine_that_is_gone_decides_no_more(redis_url: str) -> None:
    """Nor does one that has lost its lease; one that lives does, also over those that start with its policy."""
    async with fleet(redis_url, "fcfs") as world:
        [old] = world.engines
        await asyncio.sleep(0.002)  # a later start in ms
        async with EngineSession(world.broker, model=MODEL, on_lost=lambda _: None, policy="fair") as canary:
            await canary.lease.beat()
            await old.lease.beat()
            assert await policy_of(world.broker) == "fair"
        await old.lease.beat()
        assert await policy_of(world.broker) == "fcfs"


async def test_an_engine_starts_by_the_time_of_redis(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(redis_url, "fcfs") as world:
        with monkeypatch.context() as ahead:
            now_ns = time.time_ns
            ahead.setattr(time, "time_ns", lambda: now_ns() + 86_400 * 10**9)
            early = EngineSession(world.broker, model=MODEL, on_lost=lambda _: None, policy="fair")
        async with early:
            await early.lease.beat()
            await asyncio.sleep(0.002)  # a later start in ms
            async with EngineSession(
                world.broker, model=MODEL, on_lost=lambda _: None, policy="shortest_first"
            ) as late:
                await late.lease.beat()
                await early.lease.beat()
                assert await policy_of(world.broker) == "shortest_first"


async def test_what_a_tenant_had_is_lost_with_the_memory_of_redis(redis_server: Place, redis_url: str) -> None:
    """A gateway that lives on knows times of before, which no partition has any more."""
    async with fleet(redis_url, "fair") as world:
        for _ in range(12):
            await world.accept("early", tokens=5000)
        ask_all(redis_server, "FLUSHALL")
        await world.broker.publish_model(card(), partitions=PARTITIONS)
        async with EngineSession(world.broker, model=MODEL, on_lost=lambda _: None, policy="fair") as engine:
            await engine.lease.beat()
            world.engines = [engine]
            early = [await world.accept("early", tokens=110) for _ in range(2)]
            for _ in range(8):
                await world.accept("late", tokens=110)
            order = await world.claim(10)
            assert order.index(early[0]) <= 1
            assert order.index(early[1]) <= 3


async def test_engines_claim_by_virtual_time_when_redis_is_full(redis_server: Place, redis_url: str) -> None:
    """Also from a partition that has only to learn the virtual time of the others."""
    async with fleet(redis_url, "fair") as world:
        accepted = [await world.accept(tokens=200, partition=number % PARTITIONS) for number in range(12)]
        ask_all(redis_server, "CONFIG", "SET", "maxmemory", 1)
        try:
            assert sorted(await world.claim(12)) == sorted(accepted)
        finally:
            ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)


async def test_the_sum_of_expected_outputs_does_not_drift(redis_url: str) -> None:
    """An engine of a version without it takes requests and leaves their part of the sum."""
    async with fleet(redis_url, "fcfs") as world:
        [gateway] = world.gateways
        table = {"octave_parts": 4, "prior": 8, "rows": [[None, None, 300, 200]]}
        gateway.acceptor.lengths.note_published(MODEL, [json.dumps(table).encode()])
        execute, [where, *_] = world.broker.connection.execute, await world.broker.directory.all_partitions(MODEL)

        async def accepted() -> int:
            request = spec(prompt=range(50), partition=0)
            request.sampling.max_tokens = 1000
            await gateway.accept(request)
            return int(await execute("HGET", f"{where.prefix}meta", "outputs:0"))

        assert [await accepted(), await accepted()] == [300, 600]
        await execute("XTRIM", f"{where.prefix}queue:0", "MAXLEN", 0)
        assert await accepted() == 300
        await execute("HSET", f"{where.prefix}meta", "outputs:0", 100)
        assert len(await world.claim(1)) == 1
        assert int(await execute("HGET", f"{where.prefix}meta", "outputs:0")) == 0


async def test_entries_that_an_earlier_version_adds_and_takes(redis_url: str) -> None:
    """Such a gateway ranks nothing, and such an engine leaves the ranks of what it takes."""
    async with fleet(redis_url, "shortest_first", ageing_ms=LONG_MS) as world:
        long, gone, short = [await world.accept(tokens=tokens, partition=0) for tokens in (3000, 1, 2)]
        where = await world.broker.directory.locate(gone)
        execute = world.broker.connection.execute
        entry = await execute("HGET", where.request(gone), "entry")
        await execute("XDEL", f"{where.prefix}queue:0", entry)
        await execute("HSET", where.request(gone), "state", "running")
        added = await world.accept(tokens=1500, partition=0)
        entry = await execute("HGET", where.request(added), "entry")
        await execute("ZREM", f"{where.prefix}ranks:0", entry)
        assert await world.claim(4) == [short, added, long]
        assert await execute("EXISTS", f"{where.prefix}ranks:0") == 0


async def test_what_is_cancelled_leaves_the_order(redis_url: str) -> None:
    async with fleet(redis_url, "fair") as world:
        request = await world.accept(partition=1)
        where = await world.broker.directory.locate(request)
        ranks = f"{where.prefix}ranks:0"
        assert await world.broker.connection.execute("ZCARD", ranks) == 1
        await world.broker.cancel(request, "a")
        assert await world.broker.connection.execute("EXISTS", ranks) == 0
        assert await world.claim(1) == []


@pytest.mark.parametrize("policy", ["shortest_first", "fair"])
async def test_the_position_follows_the_policy(redis_url: str, policy: str) -> None:
    async with fleet(redis_url, policy) as world:
        flood = [await world.accept("flood", tokens=120, priority=number % 2) for number in range(8)]
        small = await world.accept("small", tokens=1)
        before = [(await world.broker.view(each, "flood")).queue_position for each in flood]
        first = (await world.broker.view(small, "small")).queue_position
        place = await world.broker.queue_position(small, "small")
        assert place is not None
        assert place.requests == first
        order = await world.claim(9)
        assert first == 0
        assert None not in before
        if policy == "fair":
            assert before[1:] == [order.index(each) for each in flood[1:]]
        else:
            assert [order.index(each) < 5 for each in flood] == [
                position < 5 for position in before if position is not None
            ]
