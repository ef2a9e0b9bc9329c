"""A cluster's master that does not answer at all: the others' partitions are served as if nothing were."""

import asyncio
import dataclasses
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from pagestream.v1.inference_pb2 import REQUEST_STATE_QUEUED
from pagestream_streams import AppendKind, Broker, GatewaySession, ServerBinary, StreamsSettings
from pagestream_streams.connection import ClusterTopology
from pagestream_streams.protocol import Keyspace, Partition
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import (
    MODEL,
    TENANT,
    append_of,
    card,
    eventually,
    numbers,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.topologies import Server, Topology, fresh, running_cluster, until

pytestmark = [pytest.mark.served, pytest.mark.slow]

PARTITIONS = 8
COUNT = 200  # more than there may be commands on their way at once
SHIPPED = (
    StreamsSettings()
)  # a command waits 5 s for its answer, which is longer than a lease and than a hole in sweeps


@pytest.fixture(scope="module")
def topology(seven: ServerBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    with running_cluster(tmp_path_factory.mktemp("silent"), seven, replicas=0) as running:
        yield running


@pytest.fixture
async def broker(topology: Topology) -> AsyncIterator[Broker]:
    async with await Broker.connect(fresh(topology), SHIPPED) as broker:
        await broker.publish_model(card(MODEL), partitions=PARTITIONS)
        yield broker


def port_of(broker: Broker, key: str) -> int:
    topology = broker.connection.topology
    assert isinstance(topology, ClusterTopology)
    return int(topology.node(key).port)


@contextmanager
def silent(topology: Topology, port: int) -> Iterator[None]:
    [process] = [each.process for each in topology.masters() if each.port == port and each.process]
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
        until(lambda: all(is_whole(each) for each in topology.servers), "the cluster is whole again", topology.servers)


def is_whole(server: Server) -> bool:
    """Whether it takes commands for all slots."""
    info = server.ask("CLUSTER INFO")
    assert isinstance(info, dict)
    return (info["cluster_state"], info["cluster_slots_ok"]) == ("ok", "16384")


def elsewhere(broker: Broker, port: int) -> int:
    """A partition of another master."""
    ports = {number: port_of(broker, Partition(MODEL, number).prefix) for number in range(PARTITIONS)}
    assert port in ports.values(), "the silent one has partitions, too"
    return next(number for number, each in ports.items() if each != port)


@pytest.mark.parametrize("key", [Keyspace().models, Keyspace().model(MODEL), Keyspace().engines(MODEL)])
async def test_the_dead_of_other_partitions_are_reclaimed(topology: Topology, broker: Broker, key: str) -> None:
    """Whatever else the silent one has: the names of the models, their cards, who serves them."""
    port = port_of(broker, key)
    async with GatewaySession(broker), worker(broker, "dead") as dead, worker(broker, "living"):
        request = spec(partition=elsewhere(broker, port))
        async with GatewaySession(broker) as gateway:
            await gateway.accept(request)
            [claim] = await dead.claim()
            with silent(topology, port):
                await dead.session.sweeper.stop()
                await dead.session.lease.stop()

                async def is_queued() -> bool:
                    return (await broker.view(claim.request_id, TENANT)).state == REQUEST_STATE_QUEUED

                await eventually(is_queued, 15)


async def test_streams_of_other_partitions_go_on(topology: Topology, broker: Broker) -> None:
    """Also where the silent node has the channel of the reader's gateway: nothing waits for a wake-up to be sent."""
    gateway = GatewaySession(broker)
    port = port_of(broker, Keyspace().wake_ups(gateway.gateway_id))
    async with gateway, worker(broker) as engine:
        request = spec(partition=elsewhere(broker, port))
        await gateway.accept(request)
        [claim] = await engine.claim()
        reading = asyncio.create_task(read_all(gateway, request.request_id, limit_s=LIMIT_S))
        with silent(topology, port):
            begun = time.monotonic()
            digest = await engine.generate(claim, COUNT)
            assert time.monotonic() - begun < COUNT * SHIPPED.command_timeout_s / 10
            await engine.generate(dataclasses.replace(claim, next_index=COUNT, digest=digest), COUNT, finish=True)
            assert numbers(await reading) == list(range(100, 100 + COUNT))
            assert engine.lost == [], "its beats got through"


async def test_an_append_tells_what_was_taken_and_what_was_not(topology: Topology, broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        port = port_of(broker, Partition(MODEL, 0).prefix)
        requests = spec(partition=0), spec(partition=elsewhere(broker, port))
        for request in requests:
            await gateway.accept(request)
        claims = {claim.request_id: claim for claim in await engine.claim(2)}
        stranded, well = (claims[request.request_id] for request in requests)
        appends = [append_of(each, 0, tokens([100])) for each in (stranded, well)]
        with silent(topology, port):
            outcomes = await engine.session.append(appends)
            assert [outcome.kind for outcome in outcomes] == [AppendKind.AWAY, AppendKind.OK]
            assert not outcomes[0].lost
        outcomes = await engine.session.append(appends)
        assert [(outcome.kind, outcome.next_index) for outcome in outcomes] == [(AppendKind.OK, 1)] * 2


async def test_a_full_engine_takes_the_first_class_from_other_partitions(topology: Topology, broker: Broker) -> None:
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        port = port_of(broker, Partition(MODEL, 0).prefix)
        with silent(topology, port):
            request, begun = spec(partition=elsewhere(broker, port)), time.monotonic()
            await gateway.accept(request)
            [claim] = await engine.session.claim_first_class(max_requests=1)
            assert claim.request_id == request.request_id
            assert time.monotonic() - begun < SHIPPED.command_timeout_s


async def test_claims_of_other_partitions_go_on(topology: Topology, broker: Broker) -> None:
    """The silent node holds the earliest requests, and is asked for them at most once a second."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        port = port_of(broker, Partition(MODEL, 0).prefix)
        await gateway.accept(spec(partition=0))
        with silent(topology, port):
            slowest, begun = 0.0, time.monotonic()
            for _ in range(10):
                request = spec(partition=elsewhere(broker, port))
                await gateway.accept(request)
                asked_at = time.monotonic()
                [claim] = await engine.claim()
                assert claim.request_id == request.request_id
                slowest = max(slowest, time.monotonic() - asked_at)
            assert slowest < SHIPPED.command_timeout_s / 2
            assert time.monotonic() - begun < 2 * SHIPPED.command_timeout_s
        [claim] = await engine.claim()
        assert claim.spec.request_id != request.request_id
