"""Redis as it really is: clusters, failovers, TLS, and the states in which a server refuses."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from pagestream_streams import Broker
from pagestream_streams.embedded import ServerBinary, find_servers
from redis_servers import skip_for_want_of
from redis_topologies import Topology, running_cluster, running_sentinels
from token_streams import FAST, MODEL, card


@pytest.fixture(scope="session")
def seven() -> ServerBinary:
    """A server that knows clusters, Sentinels and TLS: a wheel's is built without some of them."""
    for server in find_servers():
        if server.version[0] >= 7 and "site-packages" not in server.path.parts:
            return server
    skip_for_want_of("redis7", "no redis-server or valkey-server from 7.0 on is on the PATH")
    raise AssertionError


@pytest.fixture(scope="session")
def cluster(seven: ServerBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """Three masters, each with a replica."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), seven) as topology:
        yield topology


@pytest.fixture(scope="session")
def watched(seven: ServerBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """A master with a replica, and three Sentinels."""
    with running_sentinels(tmp_path_factory.mktemp("sentinels"), seven) as topology:
        yield topology


@pytest.fixture(scope="module")
def redis_server(topology: Topology) -> Topology:
    """What tests of the streams ask for an address."""
    return topology


@pytest.fixture
def redis_url(topology: Topology) -> str:
    """The address of servers without any keys."""
    return topology.empty()


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
