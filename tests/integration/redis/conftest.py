"""Redis as it really is: clusters, failovers, TLS, and the states in which a server refuses."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from pagestream_streams import Broker
from support.protocol.token_streams import FAST, MODEL, card


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    """Knows one model with two partitions."""
    async with await Broker.connect(redis_url, FAST) as broker:
        await broker.publish_model(card(MODEL), partitions=2)
        yield broker


@pytest.fixture(autouse=True)
def no_task_left() -> Iterator[None]:
    """A test that leaves a task behind would be seen by its neighbour."""
    yield
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
