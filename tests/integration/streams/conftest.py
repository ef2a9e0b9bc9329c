"""The protocol's tests run on the oldest server that is supported and on the newest that is here."""

from collections.abc import AsyncIterator, Iterator

import pytest
from pagestream_streams import Broker
from pagestream_streams.embedded import EmbeddedRedis
from redis_servers import newest_server, oldest_server, running_server
from token_streams import FAST, MODEL, card


@pytest.fixture(scope="module", params=[oldest_server, newest_server], ids=["oldest", "newest"])
def redis_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with running_server(tmp_path_factory.mktemp("redis"), request.param()) as server:
        yield server


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    """Knows one model with two partitions."""
    async with await Broker.connect(redis_url, FAST) as broker:
        await broker.publish_model(card(MODEL), partitions=2)
        yield broker
