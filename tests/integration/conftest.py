"""Servers that know each other, one set for all tests of a session."""

from collections.abc import Iterator

import pytest
from pagestream_streams.connection.embedded import ServerBinary, find_servers
from support.redis.servers import skip_for_want_of
from support.redis.topologies import Topology, running_cluster, running_sentinels


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
def sentinels(seven: ServerBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """A master with a replica, and three Sentinels."""
    with running_sentinels(tmp_path_factory.mktemp("sentinels"), seven) as topology:
        yield topology
