"""The protocol's tests run on every kind of server: streams_suite says on which in `make test`."""

from collections.abc import AsyncIterator, Iterator

import pytest
from pagestream_streams import Broker
from support.protocol.suite import CLUSTER, OLDEST, SENTINELS, is_in_cover, places
from support.protocol.token_streams import FAST, MODEL, card
from support.redis.servers import newest_server, oldest_server, running_server
from support.redis.topologies import Place, fresh


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Takes a test to its servers; those outside of `make test` are slow."""
    if "redis_server" not in metafunc.fixturenames:
        return
    module = metafunc.module.__name__.rpartition(".")[2]
    test = metafunc.function.__qualname__.replace(".", "::")
    found = places(module, test)
    if not found:
        return  # it has servers of its own
    chosen = [
        pytest.param(place, id=place, marks=[] if is_in_cover(module, place) else [pytest.mark.slow]) for place in found
    ]
    metafunc.parametrize("redis_server", chosen, indirect=True, scope="module")


@pytest.fixture(scope="module")
def redis_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where the test runs. Cluster and Sentinels are of the whole session."""
    if request.param in (CLUSTER, SENTINELS):
        yield request.getfixturevalue(request.param)
        return
    binary = oldest_server() if request.param == OLDEST else newest_server()
    with running_server(tmp_path_factory.mktemp("redis"), binary) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: Place) -> str:
    """The address of servers without any keys."""
    return fresh(redis_server)


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    """Knows one model with two partitions."""
    async with await Broker.connect(redis_url, FAST) as broker:
        await broker.publish_model(card(MODEL), partitions=2)
        yield broker
