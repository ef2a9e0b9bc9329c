"""First come, first served, with classes that age: over all partitions, however many engines claim."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from pagestream_streams import Broker, Claim, EngineSession, GatewaySession, scripts
from pagestream_streams.connection import Call
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import MODEL, STILL, card, eventually, spec

pytestmark = pytest.mark.served

TOLERANCE_MS = 250
AGEING_MS = 400
HOT = 0
"""The partition with the standing backlog."""

# Heartbeats would ask every partition sixteen times a second.
QUIET = dataclasses.replace(STILL, steal_after_ms=20, ageing_ms=AGEING_MS)


@asynccontextmanager
async def engines(url: str, partitions: int, count: int) -> AsyncIterator[list[EngineSession]]:
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(await Broker.connect(url, QUIET))
        await broker.publish_model(card(), partitions=partitions)
        sessions = [
            await stack.enter_async_context(
                EngineSession(broker, model=MODEL, engine_id=f"engine-{number}", on_lost=lambda _: None)
            )
            for number in range(count)
        ]
        for session in sessions:
            await session.lease.beat()  # all of them know each other
        owners = Counter(number for session in sessions for number in session.assignment.own)
        assert owners == dict.fromkeys(range(partitions), 1)
        yield sessions


async def keys_of(broker: Broker, request_ids: Sequence[str]) -> dict[str, int]:
    """Return each request's virtual arrival by Redis' clock, computed from its record."""
    places = [await broker.directory.locate(each) for each in request_ids]
    commands = [
        ("HMGET", where.request(each), "accepted", "class") for where, each in zip(places, request_ids, strict=True)
    ]
    found = await broker.connection.pipeline(commands)
    return {each: int(at) + int(class_) * AGEING_MS for each, (at, class_) in zip(request_ids, found, strict=True)}


def inversion(order: Sequence[str], keys: dict[str, int]) -> int:
    """Return by how much the worst request went before an earlier one, in ms."""
    worst, least = 0, keys[order[-1]]
    for each in reversed(order):
        least = min(least, keys[each])
        worst = max(worst, keys[each] - least)
    return worst


@pytest.mark.parametrize(
    ("partitions", "count"),
    [(4, 10), (256, 1), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(256, 10, marks=pytest.mark.slow)],
)
async def test_a_backlog_is_claimed_in_order(redis_url: str, partitions: int, count: int) -> None:
    async with await Broker.connect(redis_url, QUIET) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=partitions)
        waiting = []
        for number in range(150):
            elsewhere = 1 + number * 7 % (partitions - 1)
            request = spec(partition=HOT if number % 2 else elsewhere, priority=(0, 0, 0, 1, 2)[number % 5])
            await gateway.accept(request)
            waiting.append(request.request_id)
            await asyncio.sleep(0.004)  # spreads the arrivals over twice the tolerance
        async with engines(redis_url, partitions, count) as sessions:
            claims: list[Claim] = []
            rounds_s: list[float] = []
            now = asyncio.get_running_loop().time

            async def drain(session: EngineSession) -> None:
                async with asyncio.timeout(LIMIT_S):
                    while len(claims) < len(waiting):
                        begun = now()
                        claims.extend(await session.claim(max_requests=3, max_prompt_tokens=1000))
                        await session.wait_for_work(0.01)
                        rounds_s.append(now() - begun)

            await asyncio.gather(*(drain(session) for session in sessions))
            keys = await keys_of(broker, waiting)
            at = {each.request_id: keys[each.request_id] for each in claims}
            assert sorted(at) == sorted(waiting)
            assert max(keys.values()) - min(keys.values()) > 2 * TOLERANCE_MS, "else any order would do"
            accepted = await accepted_at(broker, waiting)
            by_time = sorted(claims, key=lambda each: accepted[each.request_id] + each.waited_s * 1000)
            seen_late_ms = 1000 * max(rounds_s)  # on a busy machine: what was looked at before a claim is as old
            assert inversion([each.request_id for each in by_time], keys) <= TOLERANCE_MS + seen_late_ms


async def accepted_at(broker: Broker, request_ids: Sequence[str]) -> dict[str, int]:
    places = [await broker.directory.locate(each) for each in request_ids]
    found = await broker.connection.pipeline(
        [("HGET", where.request(each), "accepted") for where, each in zip(places, request_ids, strict=True)]
    )
    return {each: int(at) for each, at in zip(request_ids, found, strict=True)}


@pytest.mark.parametrize(
    ("partitions", "class_of_backlog"),
    [(4, 2), (256, 0), pytest.param(4, 0, marks=pytest.mark.slow), pytest.param(256, 2, marks=pytest.mark.slow)],
)
async def test_nothing_elsewhere_starves_behind_a_standing_backlog(
    redis_url: str, partitions: int, class_of_backlog: int
) -> None:
    async with (
        engines(redis_url, partitions, 1) as [engine],
        await Broker.connect(redis_url, QUIET) as broker,
        GatewaySession(broker) as gateway,
    ):
        for _ in range(20):
            await gateway.accept(spec(partition=HOT, priority=class_of_backlog))
        await engine.claim(max_requests=1, max_prompt_tokens=1000)
        single = spec(partition=partitions - 1)
        await gateway.accept(single)

        async def is_claimed() -> bool:
            await gateway.accept(spec(partition=HOT, priority=class_of_backlog))
            claims = await engine.claim(max_requests=1, max_prompt_tokens=1000)
            return single.request_id in {each.request_id for each in claims}

        await eventually(is_claimed)


async def test_only_the_owner_keeps_room_for_a_large_request(redis_url: str) -> None:
    """Other engines go on with what fits, also from behind it; the owner claims it before all that is later."""
    async with (
        engines(redis_url, 32, 2) as [one, other],
        await Broker.connect(redis_url, QUIET) as broker,
        GatewaySession(broker) as gateway,
    ):
        [at, *_] = one.assignment.own
        large, behind, *small = spec(partition=at, prompt=range(80)), spec(partition=at), spec(), spec(partition=1)
        for request in (large, behind, *small):
            await gateway.accept(request)

        async def is_kept() -> bool:
            one.doorbell.ring_all()
            claims = await one.claim(max_requests=9, max_prompt_tokens=2)
            assert claims == []
            return one.claim_order.reserves(one.assignment.own, 50)

        await eventually(is_kept)
        assert await one.claim(max_requests=9, max_prompt_tokens=50) == []
        claims = await other.claim(max_requests=9, max_prompt_tokens=50)
        assert {each.request_id for each in claims} == {each.request_id for each in (behind, *small)}
        [claim] = await one.claim(max_requests=9, max_prompt_tokens=80)
        assert claim.request_id == large.request_id


async def test_a_suspect_that_is_gone_lends_its_turn_to_none(redis_url: str) -> None:
    """The last heartbeat saw one; what else waits in its partition comes after what is earlier elsewhere."""
    async with (
        engines(redis_url, 4, 1) as [engine],
        await Broker.connect(redis_url, QUIET) as broker,
        GatewaySession(broker) as gateway,
    ):
        later, earlier = spec(partition=3, priority=2), spec(partition=0)
        for request in (later, earlier):
            await gateway.accept(request)
        engine.assignment.with_suspects = {3}
        [claim] = await engine.claim(max_requests=1, max_prompt_tokens=1000)
        assert claim.request_id == earlier.request_id


async def test_room_that_is_kept_for_a_lower_class_is_not_asked_for_again_and_again(redis_url: str) -> None:
    """A large request of class 2 keeps the room, behind one of class 0 that is too large as well but has not aged."""
    patient = dataclasses.replace(QUIET, ageing_ms=10**12)
    async with await Broker.connect(redis_url, patient) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=1)
        [where] = await broker.directory.all_partitions(MODEL)
        aged, first, small = (
            spec(prompt=range(80), priority=2),
            spec(prompt=range(80), priority=0),
            spec(priority=2),
        )
        await gateway.accept(aged)
        queue = f"{where.prefix}queue:2"  # as if it had waited since 1970
        await broker.connection.execute("DEL", queue)
        await broker.connection.execute("XADD", queue, "1-0", "id", aged.request_id, "t", 80)
        await broker.connection.execute("HSET", where.request(aged.request_id), "entry", "1-0")
        for request in (first, small):
            await gateway.accept(request)
        async with EngineSession(broker, model=MODEL, on_lost=lambda _: None) as engine:
            sent = 0
            run_each = broker.connection.run_each

            async def counted(calls: Sequence[Call], limit_s: float | None = None) -> list[object]:
                nonlocal sent
                sent += sum(call.script is scripts.CLAIM for call in calls)
                return await run_each(calls, limit_s)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(broker.connection, "run_each", counted)
                assert await engine.claim(max_requests=9, max_prompt_tokens=50) == []
            assert sent <= 2
            claims = await engine.claim(max_requests=9, max_prompt_tokens=170)
            assert [each.request_id for each in claims] == [each.request_id for each in (first, aged, small)]


async def test_what_nothing_can_come_before_is_claimed_in_one_round_trip(redis_url: str) -> None:
    async with await Broker.connect(redis_url, QUIET) as broker, GatewaySession(broker) as gateway:
        await broker.publish_model(card(), partitions=4)
        async with EngineSession(broker, model=MODEL, on_lost=lambda _: None) as engine:
            await engine.subscription.subscribed(5.0)
            assert await engine.claim(max_requests=9, max_prompt_tokens=100) == []
            request = spec(partition=1)
            await gateway.accept(request)
            await engine.doorbell.wait(5.0)
            sent = 0
            run_each = broker.connection.run_each

            async def counted(calls: Sequence[Call], limit_s: float | None = None) -> list[object]:
                nonlocal sent
                sent += any(call.script is scripts.CLAIM for call in calls)
                return await run_each(calls, limit_s)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(broker.connection, "run_each", counted)
                [claim] = await engine.claim(max_requests=9, max_prompt_tokens=100)
            assert claim.request_id == request.request_id
            assert sent == 1
