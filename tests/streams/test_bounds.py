"""The queue's bounds: tenants' shares of them, and classes that engines have refused."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from pagestream_streams import Broker, ClassRefused, EngineSession, GatewaySession, QueueFull
from support.protocol.token_streams import CALM, MODEL, Worker, eventually, lapse, spec, worker

pytestmark = pytest.mark.served

PREFIX = f"ps:{{{MODEL}/0}}:"


async def connected(redis_url: str, **changes: object) -> Broker:
    return await Broker.connect(redis_url, dataclasses.replace(CALM, **changes))  # type: ignore[arg-type]


@pytest.fixture
async def narrow(redis_url: str, broker: Broker) -> AsyncIterator[Broker]:
    async with await connected(redis_url, max_queued_requests=8) as narrow:
        yield narrow


async def fill(gateway: GatewaySession, tenant: str, size: int = 3) -> int:
    """Accepts until the queue is full; how many were."""
    for count in range(100):
        try:
            await gateway.accept(spec(tenant=tenant, prompt=range(size)))
        except QueueFull:
            return count
    raise AssertionError("the queue has no bound")


async def test_alone_a_tenant_may_use_it_all(narrow: Broker) -> None:
    async with GatewaySession(narrow) as gateway:
        assert await fill(gateway, "a") == 8


async def test_while_others_wait_each_gets_its_share(narrow: Broker) -> None:
    async with GatewaySession(narrow) as gateway:
        await gateway.accept(spec(tenant="b"))
        assert await fill(gateway, "a") == 4
        with pytest.raises(QueueFull, match="of this tenant, while other tenants wait") as caught:
            await gateway.accept(spec(tenant="a"))
        error = caught.value
        assert (error.tenant, error.limit, error.bound, error.queued) == ("a", "requests", 4, 4)
        assert await fill(gateway, "b") == 3
        with pytest.raises(QueueFull) as caught:
            await gateway.accept(spec(tenant="c"))
        assert caught.value.tenant == "", "all together are too many"


async def test_shares_go_by_weight(redis_url: str, broker: Broker) -> None:
    async with await connected(redis_url, max_queued_requests=8, tenant_weights={"gold": 3}) as weighty:
        async with GatewaySession(weighty) as gateway:
            await gateway.accept(spec(tenant="gold"))
            await gateway.accept(spec(tenant="iron"))
            assert await fill(gateway, "iron") == 1
            assert await fill(gateway, "gold") == 5


async def test_shares_are_of_prompt_tokens_too(redis_url: str, broker: Broker) -> None:
    async with await connected(redis_url, max_queued_prompt_tokens=40) as narrow, GatewaySession(narrow) as gateway:
        await gateway.accept(spec(tenant="b", prompt=range(4)))
        assert await fill(gateway, "a", size=6) == 3
        with pytest.raises(QueueFull, match="prompt tokens of this tenant"):
            await gateway.accept(spec(tenant="a", prompt=range(3)))
        await gateway.accept(spec(tenant="a", prompt=range(2)))


async def test_one_request_of_any_size_is_everybody_s(redis_url: str, broker: Broker) -> None:
    async with await connected(redis_url, max_queued_prompt_tokens=40) as narrow, GatewaySession(narrow) as gateway:
        await gateway.accept(spec(tenant="b", prompt=range(4)))
        await gateway.accept(spec(tenant="a", prompt=range(30)))


async def test_room_can_be_kept_for_who_comes_next(redis_url: str, broker: Broker) -> None:
    async with await connected(redis_url, max_queued_requests=8, tenant_alone_percent=75) as kept:
        async with GatewaySession(kept) as gateway:
            assert await fill(gateway, "a") == 6
            assert await fill(gateway, "b") == 2


async def test_what_is_claimed_or_cancelled_no_longer_counts(narrow: Broker) -> None:
    async with GatewaySession(narrow) as gateway, worker(narrow) as engine:
        request = spec(tenant="b")
        await gateway.accept(request)
        assert await fill(gateway, "a") == 4
        await narrow.cancel(request.request_id, "b")
        assert await fill(gateway, "a") == 4, "no other tenant waits any more"
        await engine.claim(8)
        left = await narrow.connection.execute("HGETALL", PREFIX + "tenants:0")
        weights = await narrow.connection.execute("HGET", PREFIX + "meta", "weights:0")
        assert (left, int(weights)) == ({}, 0)


async def test_what_is_handed_back_is_exempt(narrow: Broker) -> None:
    async with GatewaySession(narrow) as gateway:
        assert await fill(gateway, "a") == 8
        async with worker(narrow) as engine:
            await engine.claim(8)
        await gateway.accept(spec(tenant="b"))
        assert await fill(gateway, "a") == 4


# -- What engines short of memory leave alone: the classes that they claim no more, and ask gateways to refuse.


async def engine_on(broker: Broker, stack: AsyncExitStack) -> Worker:
    return Worker(await stack.enter_async_context(EngineSession(broker, model=MODEL, on_lost=lambda _: None)))


async def test_no_new_request_of_a_lower_class_is_claimed_and_begun_ones_are(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, AsyncExitStack() as stack:
        begun, held, lower, first = spec(priority=2), spec(), spec(priority=2), spec(priority=0)
        await gateway.accept(begun)
        engine = await engine_on(broker, stack)
        [claim] = await engine.claim()
        await engine.generate(claim, 2)
        await gateway.accept(held)
        await engine.claim()
        await engine.session.hand_back([begun.request_id])
        for each in (lower, first):
            await gateway.accept(each)
        engine.session.limit_classes(claimed=1, refused=None)
        claims = await engine.session.claim(max_requests=9, max_prompt_tokens=1000)
        assert [claim.request_id for claim in claims] == [begun.request_id, first.request_id]
        engine.session.limit_classes(claimed=None, refused=None)
        [claim] = await engine.session.claim(max_requests=9, max_prompt_tokens=1000)
        assert claim.request_id == lower.request_id


async def test_an_engine_that_holds_nothing_claims_every_class(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, AsyncExitStack() as stack:
        held, lower = spec(priority=0), spec(priority=2)
        engine = await engine_on(broker, stack)
        engine.session.limit_classes(claimed=0, refused=None)
        await gateway.accept(held)
        [claim] = await engine.claim()
        await gateway.accept(lower)
        assert not await engine.session.claim(max_requests=1, max_prompt_tokens=1000)
        await engine.generate(claim, 1, finish=True)
        [claim] = await engine.session.claim(max_requests=1, max_prompt_tokens=1000)
        assert claim.request_id == lower.request_id


async def test_a_class_is_refused_while_every_living_engine_asks_for_it(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, AsyncExitStack() as stack:

        async def is_refused(priority: int) -> bool:
            try:
                await gateway.accept(spec(priority=priority))
            except ClassRefused:
                return True
            return False

        first = await engine_on(broker, stack)
        first.session.limit_classes(claimed=0, refused=1)
        await eventually(lambda: is_refused(2))
        assert [await is_refused(priority) for priority in (0, 1)] == [False, True]
        known = spec(priority=2)
        first.session.limit_classes(claimed=None, refused=None)
        await eventually(lambda: is_accepted(gateway))
        await gateway.accept(known)
        first.session.limit_classes(claimed=0, refused=1)
        await eventually(lambda: is_refused(2))
        assert not await gateway.accept(known), "what was accepted is joined"

        async with AsyncExitStack() as other:
            second = await engine_on(broker, other)
            assert not await is_refused(2), "an engine that takes all has joined"
            second.session.limit_classes(claimed=1, refused=2)
            await eventually(lambda: is_refused(2))
            assert not await is_refused(1), "the second engine takes it"
        await eventually(lambda: is_refused(1))


async def test_a_dead_engine_refuses_nothing(broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, AsyncExitStack() as stack:
        engine = await engine_on(broker, stack)
        engine.session.limit_classes(claimed=0, refused=1)
        await engine.session.lease.beat()
        with pytest.raises(ClassRefused, match="priority 1 and lower now, given 2") as caught:
            await gateway.accept(spec(priority=2))
        assert (caught.value.least_refused, caught.value.retry_after_s) == (1, 5.0)
        await engine.session.lease.stop()
        await lapse(broker, engine.session)
        await eventually(lambda: is_accepted(gateway))


async def is_accepted(gateway: GatewaySession) -> bool:
    try:
        await gateway.accept(spec(priority=2))
    except ClassRefused:
        return False
    return True
