"""Beats that are not answered: an engine lives as long as one of them comes through."""

import asyncio
import dataclasses

import pytest
from pagestream_streams import Broker, EmbeddedRedis, GatewaySession, StreamsSettings
from support.network.flaky_network import FlakyNetwork
from support.protocol.token_streams import FAST, Worker, numbers, read_all, spec, worker

SHIPPED = StreamsSettings()
# What is tested is how the shipped times stand to each other. As they are, they leave a busy machine 0.3 s to be late
# in; larger ones leave it more, and it is no later for that.
SCALE = 3
AS_SHIPPED = dataclasses.replace(
    FAST,
    lease_ms=SCALE * SHIPPED.lease_ms,
    heartbeat_ms=SCALE * SHIPPED.heartbeat_ms,
    sweep_ms=SCALE * SHIPPED.sweep_ms,
    sweep_gap_ms=SCALE * SHIPPED.sweep_gap_ms,
    command_timeout_s=SCALE * SHIPPED.command_timeout_s,
)
STRANDED = 4  # connections, of pipelines that run at the same time
PAUSE_MS = SCALE * (SHIPPED.sweep_gap_ms - 50)
BETWEEN_S = SCALE * 0.45


async def claims_nothing(other: Worker, seconds: float) -> None:
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        assert await other.session.claim(max_requests=1, max_prompt_tokens=100) == []
        await other.session.wait_for_work(0.05)


@pytest.mark.slow
async def test_connections_that_fall_silent_cost_no_lease(broker: Broker, redis_server: EmbeddedRedis) -> None:
    """Other commands wait for their answer for longer than a lease; a beat does not, and the next one connects anew."""
    async with (
        FlakyNetwork(redis_server.port) as network,
        await Broker.connect(redis_server.url, AS_SHIPPED) as near,
        await Broker.connect(f"redis://{network.target}/0", AS_SHIPPED) as far,
        GatewaySession(near) as gateway,
        worker(far, "a") as a,
        worker(near, "b") as b,
    ):
        request = spec()
        await gateway.accept(request)
        [claim] = await a.claim()
        await asyncio.gather(*(far.connection.pipeline([("PING",)]) for _ in range(STRANDED)))
        assert network.num_connections > STRANDED
        network.strand()
        await claims_nothing(b, 2.5 * AS_SHIPPED.lease_ms / 1000)
        assert a.lost == []
        await a.generate(claim, 2, finish=True)


@pytest.mark.slow
async def test_a_gateway_whose_connections_fall_silent_stays_a_reader(
    broker: Broker, redis_server: EmbeddedRedis
) -> None:
    async with (
        FlakyNetwork(redis_server.port) as network,
        await Broker.connect(redis_server.url, AS_SHIPPED) as near,
        await Broker.connect(f"redis://{network.target}/0", AS_SHIPPED) as far,
        GatewaySession(near),
        GatewaySession(far) as gateway,
        worker(near, "a") as a,
    ):
        request = spec()
        await gateway.accept(request)
        reading = asyncio.create_task(read_all(gateway, request.request_id, limit_s=60))
        [claim] = await a.claim()
        digest = await a.generate(claim, 1)
        await asyncio.gather(*(far.connection.pipeline([("PING",)]) for _ in range(STRANDED)))
        network.strand()
        where = await near.directory.locate(request.request_id)
        until = asyncio.get_running_loop().time() + 2.5 * AS_SHIPPED.lease_ms / 1000
        while asyncio.get_running_loop().time() < until:
            readers = await near.connection.execute("HGET", where.request(request.request_id), "readers")
            assert gateway.gateway_id.encode() in readers
            await asyncio.sleep(0.1)
        await a.generate(dataclasses.replace(claim, next_index=1, digest=digest), 2, finish=True)
        assert numbers(await reading) == [100, 101]


@pytest.mark.slow
async def test_a_pause_of_redis_that_is_no_outage_costs_no_lease(broker: Broker, redis_server: EmbeddedRedis) -> None:
    """Shorter than the hole that starts leases anew, and at any time between two beats."""
    async with (
        await Broker.connect(redis_server.url, AS_SHIPPED) as near,
        GatewaySession(near) as gateway,
        worker(near, "a") as a,
        worker(near, "b") as b,
    ):
        await gateway.accept(spec())
        [claim] = await a.claim()
        for _ in range(4):
            await near.connection.execute("CLIENT", "PAUSE", PAUSE_MS, "ALL")
            await claims_nothing(b, BETWEEN_S)
        assert a.lost == []
        await a.generate(claim, 2, finish=True)
