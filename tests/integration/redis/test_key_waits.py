"""On a cluster an idempotency key has a node of its own, and is waited for there as its request's record is."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagestream_streams import Broker, GatewaySession, Unavailable
from pagestream_streams.connection.embedded import ServerBinary
from redis.crc import key_slot
from support.protocol.token_streams import FAST, TENANT, card, eventually, spec
from support.redis.topologies import Server, Topology, num_replicas, running_cluster

WAITING = dataclasses.replace(FAST, wait_replicas=1, wait_timeout_ms=300)


@pytest.fixture
def topology(seven: ServerBinary, tmp_path: Path) -> Iterator[Topology]:
    """Two masters, each with a replica."""
    with running_cluster(tmp_path, seven, masters=2) as topology:
        yield topology


def nodes_of(topology: Topology, key: str) -> list[Server]:
    """Return a key's master and its replicas."""
    by_port = {each.port: each for each in topology.servers}
    for first, last, *nodes in topology.masters()[0].ask("CLUSTER", "SLOTS"):
        if first <= key_slot(key.encode()) <= last:
            return [by_port[node[1]] for node in nodes]
    raise AssertionError(key)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_key_without_a_replica_accepts_nothing(topology: Topology) -> None:
    async with await Broker.connect(topology.url, WAITING) as broker:
        await broker.publish_model(card(), partitions=1)
        keyspace = broker.connection.keyspace
        home = nodes_of(topology, (await broker.directory.locate(spec().request_id)).prefix)[0]
        keys = map(str, range(99))
        elsewhere = next(key for key in keys if nodes_of(topology, keyspace.idempotency(TENANT, key))[0] is not home)
        async with GatewaySession(broker) as gateway:
            assert await gateway.accept_once(spec(key=elsewhere), body_digest="d")
            name = keyspace.idempotency(TENANT, elsewhere)
            await eventually(lambda: len(nodes_of(topology, name)) == 2)  # the replicas become known one by one
            master, replica = nodes_of(topology, name)
            replica.kill()
            await eventually(lambda: num_replicas(master) == 0)
            assert await gateway.accept(spec()), "records are on the other node"
            other = next(key for key in keys if nodes_of(topology, keyspace.idempotency(TENANT, key))[0] is master)
            with pytest.raises(Unavailable, match="1 replicas"):
                await gateway.accept_once(spec(key=other), body_digest="d")
