"""What engines short of memory leave alone: the classes that they claim no more, and ask gateways to refuse."""

from contextlib import AsyncExitStack

import pytest
from pagestream_streams import Broker, ClassRefused, EngineSession, GatewaySession
from support.protocol.token_streams import MODEL, Worker, eventually, spec


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
        await engine.session.heartbeat.beat()
        with pytest.raises(ClassRefused, match="priority 1 and lower now, given 2") as caught:
            await gateway.accept(spec(priority=2))
        assert (caught.value.least_refused, caught.value.retry_after_s) == (1, 5.0)
        await engine.session.heartbeat.stop()
        await eventually(lambda: is_accepted(gateway))


async def is_accepted(gateway: GatewaySession) -> bool:
    try:
        await gateway.accept(spec(priority=2))
    except ClassRefused:
        return False
    return True
