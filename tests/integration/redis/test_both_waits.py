"""`wait_fsync` with `wait_replicas`: a server and its replica are asked in an order in which both can answer."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagestream_streams import Broker, GatewaySession, StreamsSettings
from support.protocol.token_streams import FAST, card, numbers, read_all, spec, worker
from support.redis.servers import newest_server, skip_for_want_of
from support.redis.topologies import Topology, num_replicas, running, server, until

BOTH = dataclasses.replace(FAST, wait_fsync=True, wait_replicas=1, command_timeout_s=5.0)
SHIPPED_MS = StreamsSettings().wait_timeout_ms


@pytest.fixture(params=["always", "everysec"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Topology]]:
    """A master and a replica, both with append-only files, by their appendfsync."""
    binary = newest_server()
    if binary.version < (7, 2):
        skip_for_want_of("redis7", "WAITAOF is from 7.2 on")
    options = "--appendfsync", request.param, "--repl-diskless-sync-delay", "0"
    master = server(binary, tmp_path / "master", *options)
    replica = server(binary, tmp_path / "replica", *options, "--replicaof", f"127.0.0.1 {master.port}")
    with running(Topology(f"redis://127.0.0.1:{master.port}/0", [master, replica])) as topology:
        for each in topology.servers:
            each.start()
        until(lambda: master.answers() and num_replicas(master) == 1, "the replica to follow", topology.servers)
        yield request.param, topology


async def test_what_is_healthy_is_accepted_in_time(pair: tuple[str, Topology]) -> None:
    """With `always` also within less than the second in which a replica reports by itself."""
    appendfsync, topology = pair
    limit_ms, count = (700, 6) if appendfsync == "always" else (SHIPPED_MS, 2)
    async with await Broker.connect(topology.url, dataclasses.replace(BOTH, wait_timeout_ms=limit_ms)) as broker:
        await broker.publish_model(card(), partitions=1)
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            requests = [spec() for _ in range(count)]
            for request in requests:
                assert await gateway.accept(request)
            if appendfsync == "always":
                [claim] = await engine.claim()
                await engine.generate(claim, 1, finish=True)
                assert numbers(await read_all(gateway, claim.request_id)) == [100]
