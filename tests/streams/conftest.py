"""Servers for the tests of the durable streams: one of each kind for a session, emptied between tests."""

from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cache

import pytest
import redis.utils
from pagestream_streams import Broker, EmbeddedRedis, ServerBinary
from support.protocol.token_streams import CALM, MODEL, card
from support.redis.servers import newest_server, oldest_server, running_server, server_of_seven
from support.redis.topologies import Place, Topology, fresh, running_cluster, running_sentinels

OLDEST, NEWEST, CLUSTER, SENTINELS = "oldest", "newest", "cluster", "sentinels"
PLACES = (OLDEST, NEWEST, CLUSTER, SENTINELS)
"""The oldest and the newest server of this machine, three masters with replicas, a master that Sentinels name."""
CROWDS = (CLUSTER, SENTINELS)

COVER: Mapping[str, tuple[str, ...]] = {
    "test_scripts": PLACES,
    "test_append": (NEWEST,),
    "test_models": (CLUSTER,),
    "test_policies": (CLUSTER,),
    "test_reading": (SENTINELS,),
}
"""Where a module's tests run in `make test`; those of other modules run on the oldest server.

All scripts run on every server; the rest once, where most differs: each type of reply on the newest, keys of several
partitions on a cluster, connections and readers behind Sentinels. `make deep PARTS=topologies` runs all others.
"""

OMITTED: Mapping[str, tuple[str, ...]] = {
    # Scripts on one connection, and in virtual time.
    "test_model_check": CROWDS,
    "test_model_check::test_a_broken_script_is_caught": (NEWEST,),  # what is tried is the checker
    "test_limits::test_any_order_of_requests_and_ends": CROWDS,
    "test_limits::test_a_clock_that_is_a_little_behind_forgets_nothing": CROWDS,
    "test_storm::test_a_hundred_suspects_have_run_soon_after_a_storm": CROWDS,
    "test_storm::test_an_engine_that_kept_what_has_passed_would_make_them_wait": CROWDS,
    # A single server that is stopped, cut off, or made a replica.
    "test_refusals": CROWDS,
    "test_lost_connections": CROWDS,
    # Rounds over a cluster's partitions have one part.
    "test_liveness::test_a_round_goes_on_behind_what_failed": (CLUSTER,),
    # A cluster passes messages on only once its servers know of the subscription: the first may be lost.
    "test_reads_of_accepted::test_nothing_is_asked_for": (CLUSTER,),
}
"""Where a module's tests, or one of them, do not run, and why."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take a test to its servers; those outside of `make test` are slow."""
    if "redis_server" not in metafunc.fixturenames:
        return
    module = metafunc.module.__name__.rpartition(".")[2]
    test = f"{module}::{metafunc.function.__qualname__.replace('.', '::')}"
    omitted = {*OMITTED.get(module, ()), *OMITTED.get(test, ())}
    covered = COVER.get(module, (OLDEST,))
    places = [
        pytest.param(place, id=place, marks=[] if place in covered else [pytest.mark.slow])
        for place in PLACES
        if place not in omitted
    ]
    metafunc.parametrize("redis_server", places, indirect=True, scope="session")


@pytest.fixture(scope="session", autouse=True)
def known_version() -> Iterator[None]:
    """Spare redis-py to read its version from its package's metadata for each connection (2 ms)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis.utils, "get_lib_version", cache(redis.utils.get_lib_version))
        yield


@pytest.fixture(scope="session")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with running_server(tmp_path_factory.mktemp("oldest"), oldest_server()) as server:
        yield server


@pytest.fixture(scope="session")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with running_server(tmp_path_factory.mktemp("newest"), newest_server()) as server:
        yield server


@pytest.fixture(scope="session")
def seven() -> ServerBinary:
    """A server that knows clusters, Sentinels and TLS."""
    return server_of_seven()


@pytest.fixture(scope="session")
def cluster(seven: ServerBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """Three masters, each with a replica."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), seven) as topology:
        yield topology


@pytest.fixture(scope="session")
def sentinels(seven: ServerBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """A master with a replica, and three Sentinels."""
    with running_sentinels(tmp_path_factory.mktemp("sentinels"), seven) as topology:
        yield topology


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest) -> Place:
    """Where the test runs."""
    place: Place = request.getfixturevalue(request.param)
    return place


@pytest.fixture
def redis_url(redis_server: Place) -> str:
    """The address of servers without any keys."""
    return fresh(redis_server)


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    """Knows one model with two partitions."""
    async with await Broker.connect(redis_url, CALM) as broker:
        await broker.publish_model(card(MODEL), partitions=2)
        yield broker
