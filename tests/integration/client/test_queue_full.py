"""A queue over its bounds, as the client's user meets it: a wait, or an error that says how long to wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from pagestream_client import AsyncClient, AsyncStream, QueueFull, Reconnection
from pagestream_streams import Broker, StreamsSettings
from support.clients.gateway_clients import gateway_settings, running_address
from support.engines.synthetic_engine import MODEL, running_engine, synthetic_card

LIMIT_S = 30.0


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
    async with full_client(redis_url, retry_after_s=0.2, limit_s=20.0) as client:
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
