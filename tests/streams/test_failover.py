"""A master dies and a replica takes its place: streams go on; with `wait_replicas` nothing acknowledged is lost."""

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_STOP
from pagestream_streams import Broker, Claim, GatewaySession, ServerBinary, Unavailable
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import (
    CALM,
    TENANT,
    Worker,
    append_of,
    card,
    ending,
    eventually,
    numbers,
    read_all,
    spec,
    tokens,
    worker,
)
from support.redis.topologies import Topology, num_replicas, role, running_cluster, running_sentinels

pytestmark = pytest.mark.served

COUNT = 40
WAITING = dataclasses.replace(CALM, wait_replicas=1, wait_timeout_ms=2000, command_timeout_s=3.0)


@pytest.fixture(params=["sentinels", "cluster"])
def topology(
    request: pytest.FixtureRequest, seven: ServerBinary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Topology]:
    start = running_sentinels if request.param == "sentinels" else running_cluster
    with start(tmp_path_factory.mktemp(request.param), seven) as running:
        yield running


async def generate_stubbornly(engine: Worker, claim: Claim, half_way: asyncio.Event, go_on: asyncio.Event) -> None:
    """Tokens one by one; an append without an answer is repeated, from where the log says, as an engine does."""
    entries = tokens(range(100, 100 + COUNT))
    entries += ending(entries[-1].digest, count=COUNT)
    index = 0
    while index < len(entries):
        if index == COUNT // 2:
            half_way.set()
            await go_on.wait()
        try:
            [outcome] = await engine.session.append([append_of(claim, index, entries[index : index + 1])])
        except Unavailable:
            await asyncio.sleep(0.05)
            continue
        assert not outcome.lost, outcome
        index = outcome.next_index


# redis-py's cluster client leaves connections of nodes that have gone to the collector of garbage.
LEAVES_CONNECTIONS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@LEAVES_CONNECTIONS
async def test_streams_go_on_when_a_master_dies(topology: Topology) -> None:
    async with await Broker.connect(topology.url, WAITING) as broker:
        await broker.publish_model(card(), partitions=6)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            requests = [spec(partition=number, grace_ms=60_000) for number in range(6)]
            for request in requests:
                await gateway.accept(request)
            reading = [asyncio.create_task(read_all(gateway, each.request_id, limit_s=LIMIT_S)) for each in requests]
            claims = await engine.claim(len(requests))
            go_on, half_way = asyncio.Event(), [asyncio.Event() for _ in claims]
            generating = [
                asyncio.create_task(generate_stubbornly(engine, claim, half, go_on))
                for claim, half in zip(claims, half_way, strict=True)
            ]
            for half in half_way:
                await half.wait()
            before = len(topology.masters())
            dying = topology.masters()[0]
            dying.kill()
            go_on.set()
            await eventually(
                lambda: len(topology.masters()) == before and topology.leads_to(topology.masters()), LIMIT_S
            )
            dying.start()  # it comes back as a replica: without one, nothing more would be acknowledged
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(*generating)
                for log in await asyncio.gather(*reading):
                    assert numbers(log) == list(range(100, 100 + COUNT))
                    assert log[-1].end.reason == FINISH_REASON_STOP
            # Not `engine.lost`: an end whose reply is late (no replica in time) counts there until it is sent again.
            views = [await broker.view(each.request_id, TENANT) for each in requests]
            assert [view.attempts for view in views] == [1] * len(requests)


@pytest.mark.slow  # test_durability.py has a key of a cluster without its replica
@LEAVES_CONNECTIONS
async def test_without_a_replica_nothing_is_accepted_that_asks_for_one(topology: Topology) -> None:
    async with await Broker.connect(topology.url, dataclasses.replace(WAITING, wait_timeout_ms=300)) as broker:
        await broker.publish_model(card(), partitions=1)
        for each in topology.servers:
            if role(each) != "master":
                each.kill()
        async with GatewaySession(broker) as gateway:
            await eventually(lambda: not any(map(num_replicas, topology.masters())))
            request = spec()
            with pytest.raises(Unavailable, match="1 replicas"):
                await gateway.accept(request)
        async with await Broker.connect(topology.url, CALM) as careless, GatewaySession(careless) as gateway:
            await gateway.accept(request)
