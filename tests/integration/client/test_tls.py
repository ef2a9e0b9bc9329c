"""Both clients over TLS: streams, and what they say where the certificate is not one that they trust."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from pagestream_client import AsyncClient, Client, Reconnection, Unavailable
from support.clients.gateway_clients import Address, gateway_settings, issue_certificate, running_address
from support.engines.synthetic_engine import MODEL, SyntheticEngine

IMPATIENT = Reconnection(limit_s=2.0)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return issue_certificate(tmp_path, 1)[0]


@pytest.fixture
async def gateway(engine: SyntheticEngine, redis_url: str, certificate: Path) -> AsyncIterator[Address]:
    settings = gateway_settings(redis_url)
    tls = replace(settings.gateway, tls_certificate=certificate, tls_key=certificate.with_suffix(".key"))
    async with running_address(replace(settings, gateway=tls)) as address:
        yield address


@pytest.fixture
def trusted(certificate: Path) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(certificate.read_bytes())


async def test_both_clients_stream_over_tls(gateway: Address, trusted: grpc.ChannelCredentials) -> None:
    async with AsyncClient(gateway.target, credentials=trusted) as client:
        answer = await client.generate(MODEL, "hello", max_tokens=5, seed=0).collect()

    def ask() -> str:
        with Client(gateway.target, credentials=trusted) as blocking:
            return blocking.generate(MODEL, "hello", max_tokens=5, seed=0).collect().text

    assert (answer.text, await asyncio.to_thread(ask)) == ("abcde", "abcde")


@pytest.mark.parametrize("credentials", [None, grpc.ssl_channel_credentials()], ids=["no TLS", "not trusted"])
async def test_a_gateway_that_is_not_trusted_gets_no_request(
    gateway: Address, credentials: grpc.ChannelCredentials | None
) -> None:
    async with AsyncClient(gateway.target, credentials=credentials, reconnection=IMPATIENT) as client:
        with pytest.raises(Unavailable):
            await client.generate(MODEL, "hello", max_tokens=5).collect()
