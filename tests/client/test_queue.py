"""Requests that wait, as the client's user meets them: where they stand, and a queue over its bounds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import httpx2
import pytest
from pagestream_client import AsyncClient, AsyncStream, QueueFull, Reconnection, RequestState
from pagestream_streams import Broker, EmbeddedRedis, StreamsSettings
from pagestream_streams.protocol import Partition
from support.clients.gateway_clients import gateway_settings, running_address
from support.engines.synthetic_engine import MODEL, running_engine, synthetic_card
from support.processes.waiting import LIMIT_S
from support.redis.servers import emptied

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of a Redis without any keys: each test has its own queue."""
    return emptied(redis_server)


@asynccontextmanager
async def full_client(redis_url: str, *, retry_after_s: float, limit_s: float) -> AsyncIterator[AsyncClient]:
    """A client of a gateway whose queue has its one request, and that no engine empties."""
    async with await Broker.connect(redis_url) as broker:
        await broker.publish_model(synthetic_card(), partitions=1)
    bounds = StreamsSettings(max_queued_requests=1, retry_after_max_s=retry_after_s)
    settings = replace(gateway_settings(redis_url), broker=bounds)
    async with running_address(settings) as address, asyncio.timeout(LIMIT_S):
        async with AsyncClient(address.target, reconnection=Reconnection(limit_s=limit_s)) as client:
            async with asked(client, on_disconnect="continue") as first:
                await first.accepted()
                yield client


def asked(client: AsyncClient, on_disconnect: str = "cancel") -> AsyncStream:
    return client.generate(MODEL, "hello", max_tokens=4, seed=0, on_disconnect=on_disconnect)


async def test_it_is_waited_for_until_there_is_room(redis_url: str) -> None:
    async with full_client(redis_url, retry_after_s=0.2, limit_s=LIMIT_S) as client:
        waiting = asyncio.create_task(asked(client).collect())
        done, _ = await asyncio.wait([waiting], timeout=0.5)  # more than one refusal
        assert not done
        async with running_engine(redis_url) as engine:
            assert (await waiting).text == "abcd"
            assert len(engine.claimed) == 2


async def test_a_longer_wait_than_the_limit_raises_at_once(redis_url: str) -> None:
    async with full_client(redis_url, retry_after_s=30.0, limit_s=5.0) as client:
        with pytest.raises(QueueFull, match="1 of at most 1 requests") as caught:
            await asked(client).accepted()
    assert caught.value.retry_after_s == 30.0
    assert caught.value.position is None


async def test_position_and_expected_wait_come_with_the_request(redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(LIMIT_S))
        broker = await stack.enter_async_context(await Broker.connect(redis_url))
        await broker.publish_model(synthetic_card(), partitions=4)
        address = await stack.enter_async_context(running_address(gateway_settings(redis_url)))
        grpc = await stack.enter_async_context(AsyncClient(address.target))
        http = await stack.enter_async_context(httpx2.AsyncClient(base_url=address.url))
        ids = []
        for number in range(6):  # one after the other, on several partitions
            stream = grpc.generate(MODEL, f"prompt {number}", max_tokens=4, on_disconnect="continue")
            ids.append(await (await stack.enter_async_context(stream)).accepted())
        assert len({(await broker.directory.locate(each)).number for each in ids}) > 1
        seen = [await grpc.get_request(each) for each in ids]
        assert [info.queue_position for info in seen] == [0, 1, 2, 3, 4, 5]
        assert {info.expected_wait_ms for info in seen} == {None}, "no engine lives"

        # As an engine's registration and its claims of the last second leave it.
        now, _ = await broker.connection.execute("TIME")
        await broker.connection.execute("ZADD", broker.connection.keyspace.engines(MODEL), (now + 600) * 1000, "e")
        drained = "drain_from", now * 1000, "drained", 1, "drained_tokens", 10
        await broker.connection.execute("HSET", f"{Partition(MODEL, 0).prefix}meta", *drained)
        await asyncio.sleep(0.05)  # for longer than gateways use what they have read of the queues
        by_grpc = await grpc.get_request(ids[-1])
        by_http = (await http.get(f"/v1/requests/{ids[-1]}")).json()
        assert (by_grpc.state, by_grpc.queue_position) == (RequestState.QUEUED, 5)
        assert (by_http["state"], by_http["queue_position"]) == ("queued", 5)
        for wait_ms in (by_grpc.expected_wait_ms, by_http["expected_wait_ms"]):
            assert wait_ms is not None
            assert wait_ms > 0
