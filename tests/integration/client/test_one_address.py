"""Many gateways behind one address, as behind a Kubernetes Service, where a connection stays with one of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from pagestream_client import AsyncClient, Client, Reconnection
from pagestream_client.failures import Code, Failure
from pagestream_client.grpc.connections import Connection
from support.clients.gateway_clients import Address, gateway_settings, running_address
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.network.flaky_network import FlakyNetwork
from support.network.tcp_proxy import TcpProxy
from support.protocol.token_streams import eventually

LIMIT_S = 60.0
POLICY = Reconnection(limit_s=20.0)
NO_REDIS = Failure(Code.UNAVAILABLE, "the store does not answer", reason="UNAVAILABLE")


@asynccontextmanager
async def remote_gateway(redis_url: str) -> AsyncIterator[tuple[Address, TcpProxy]]:
    """A gateway, and its way to Redis."""
    where = urlsplit(redis_url)
    assert where.port is not None
    async with TcpProxy(where.port) as way:
        settings = gateway_settings(where._replace(netloc=f"127.0.0.1:{way.port}").geturl())
        impatient = replace(settings, gateway=replace(settings.gateway, answer_limit_s=0.3))
        async with running_address(impatient) as address:
            try:
                yield address, way
            finally:
                way.heal()


@pytest.mark.parametrize("kind", [AsyncClient, Client])
async def test_a_gateway_that_is_cut_off_from_redis_is_left_for_another(
    engine: SyntheticEngine, gateway: Address, redis_url: str, kind: type[AsyncClient] | type[Client]
) -> None:
    async with (
        remote_gateway(redis_url) as (address, way),
        FlakyNetwork(address.grpc_port) as network,
        asyncio.timeout(LIMIT_S),
    ):

        def cut_off() -> None:
            way.cut()
            network._port = gateway.grpc_port  # new connections go there

        if kind is AsyncClient:
            async with AsyncClient(network.target, reconnection=POLICY) as client:
                await client.list_models()
                cut_off()
                answer = await client.generate(MODEL, "hello", max_tokens=4, seed=0).collect()
        else:
            with Client(network.target, reconnection=POLICY) as blocking:
                await asyncio.to_thread(blocking.list_models)
                cut_off()
                answer = await asyncio.to_thread(blocking.generate(MODEL, "hello", max_tokens=4, seed=0).collect)
    assert answer.text == "abcd"
    assert network.num_connections == 2


async def test_a_connection_that_was_left_lives_as_long_as_its_streams(
    engine: SyntheticEngine, gateway: Address
) -> None:
    engine.hold_at = 2
    async with FlakyNetwork(gateway.grpc_port) as network, asyncio.timeout(LIMIT_S):
        async with AsyncClient(network.target) as client:
            stream = client.generate(MODEL, "hello", max_tokens=4, seed=0)
            await stream.accepted()
            leave(client, stream._connection)
            await client.list_models()
            assert network.num_connections == 2
            engine.go_on()
            assert (await stream.collect()).text == "abcd"
            await eventually(lambda: num_open(network) == 1)
            assert network.num_connections == 2


async def test_so_it_does_in_the_blocking_client(engine: SyntheticEngine, gateway: Address) -> None:
    engine.hold_at = 2
    async with FlakyNetwork(gateway.grpc_port) as network, asyncio.timeout(LIMIT_S):
        client = Client(network.target)
        try:
            stream = client.generate(MODEL, "hello", max_tokens=4, seed=0)
            await asyncio.to_thread(stream.accepted)
            leave(client, stream._connection)
            await asyncio.to_thread(client.list_models)
            assert network.num_connections == 2
            engine.go_on()
            assert (await asyncio.to_thread(stream.collect)).text == "abcd"
            await eventually(lambda: num_open(network) == 1)
            assert network.num_connections == 2
        finally:
            await asyncio.to_thread(client.close)


def leave(client: AsyncClient | Client, connection: Connection | None) -> None:
    """As when another call on it hears that the gateway has no Redis."""
    assert connection is not None
    connection.since -= 60.0
    client._connections.failed(connection, NO_REDIS)


def num_open(network: FlakyNetwork) -> int:
    """Connections that are open; each has two ends."""
    return len(network._writers) // 2
