"""The streams' own tests on a master that Sentinels name."""

import pytest
from redis_topologies import Topology
from streams_suite import streams_tests

globals().update(streams_tests(without=("TestAnyGatewayAtAnyOffset",)))


@pytest.fixture(scope="module")
def topology(watched: Topology) -> Topology:
    return watched
