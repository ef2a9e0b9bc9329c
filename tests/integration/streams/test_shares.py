"""Tenants' shares of a queue: one tenant's flood leaves others their part."""

import dataclasses
from collections.abc import AsyncIterator

import pytest
from pagestream_streams import Broker, GatewaySession, QueueFull
from support.protocol.token_streams import FAST, MODEL, spec, worker

PREFIX = f"ps:{{{MODEL}/0}}:"


async def connected(redis_url: str, **changes: object) -> Broker:
    return await Broker.connect(redis_url, dataclasses.replace(FAST, **changes))  # type: ignore[arg-type]


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
