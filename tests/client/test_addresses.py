"""How gateways are reached: many behind one address, as behind a Kubernetes Service, and over TLS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
import pytest_asyncio
from pagestream_client import AsyncClient, Client, Reconnection, Unavailable
from support.clients.gateway_clients import Address, gateway_settings, issue_certificate, running_address
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.network.proxy import Proxy
from support.processes.waiting import LIMIT_S

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]
POLICY = Reconnection(limit_s=LIMIT_S)


@asynccontextmanager
async def remote_gateway(redis_url: str) -> AsyncIterator[tuple[Address, Proxy]]:
    """A gateway, and its way to Redis."""
    where = urlsplit(redis_url)
    assert where.port is not None
    async with Proxy(where.port) as way:
        settings = gateway_settings(where._replace(netloc=f"127.0.0.1:{way.port}").geturl())
        impatient = replace(settings, gateway=replace(settings.gateway, answer_limit_s=1.0))
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
        Proxy(address.grpc_port) as network,
        asyncio.timeout(LIMIT_S),
    ):

        def cut_off() -> None:
            way.cut()
            network.lead_to(gateway.grpc_port)

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


IMPATIENT = Reconnection(limit_s=3.0)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue_certificate(tmp_path_factory.mktemp("tls"), 1)[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secure_gateway(shared_engine: SyntheticEngine, redis_url: str, certificate: Path) -> AsyncIterator[Address]:
    settings = gateway_settings(redis_url)
    tls = replace(settings.gateway, tls_certificate=certificate, tls_key=certificate.with_suffix(".key"))
    async with running_address(replace(settings, gateway=tls)) as address:
        yield address


@pytest.fixture
def trusted(certificate: Path) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(certificate.read_bytes())


async def test_both_clients_stream_over_tls(secure_gateway: Address, trusted: grpc.ChannelCredentials) -> None:
    async with AsyncClient(secure_gateway.target, credentials=trusted) as client:
        answer = await client.generate(MODEL, "hello", max_tokens=5, seed=0).collect()

    def ask() -> str:
        with Client(secure_gateway.target, credentials=trusted) as blocking:
            return blocking.generate(MODEL, "hello", max_tokens=5, seed=0).collect().text

    assert (answer.text, await asyncio.to_thread(ask)) == ("abcde", "abcde")


@pytest.mark.parametrize("credentials", [None, grpc.ssl_channel_credentials()], ids=["no TLS", "not trusted"])
async def test_a_gateway_that_is_not_trusted_gets_no_request(
    secure_gateway: Address, credentials: grpc.ChannelCredentials | None
) -> None:
    async with AsyncClient(secure_gateway.target, credentials=credentials, reconnection=IMPATIENT) as client:
        with pytest.raises(Unavailable):
            await client.generate(MODEL, "hello", max_tokens=5).collect()
