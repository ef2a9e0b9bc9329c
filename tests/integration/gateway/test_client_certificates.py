"""Client certificates on both ports: who gets in, and as whom."""

import asyncio
import hashlib
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
import uvloop
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_gateway import Settings
from pagestream_gateway.tls import Certificate
from support.clients.gateway_clients import Address, gateway_settings, running_address
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.network.authority import Authority, Issued

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
REFUSED = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def client(ours: Authority) -> Issued:
    return ours.client("client", uris=["spiffe://prod.test/ns/team-a/sa/web"])


@pytest.fixture
def strangers(tmp_path: Path, ours: Authority) -> list[Issued | None]:
    """Clients that must not get in: of another authority, with a server's certificate, without any."""
    name = ["spiffe://prod.test/ns/team-a/sa/web"]
    other = Authority(tmp_path, "other").client("stranger", uris=name)
    return [other, ours.client("no-client", uris=name, for_clients=False), None]


@pytest.fixture
def settings(ours: Authority, redis_url: str, tmp_path: Path) -> Callable[..., Settings]:
    server, rules, keys = ours.server(), tmp_path / "rules", tmp_path / "keys"
    rules.write_text("URI:spiffe://prod.test/ns/{tenant}/sa/* -> {tenant}\n")
    keys.write_text(f"{hashlib.sha256(b'key-b').hexdigest()} -> b\n")

    def make(**more: object) -> Settings:
        base = gateway_settings(redis_url)
        given = {
            "tls_certificate": server.certificate,
            "tls_key": server.key,
            "tls_client_ca": ours.file,
            "tls_client_tenants": rules,
            "api_keys": keys,
        }
        return replace(base, gateway=replace(base.gateway, **{**given, **more}))

    return make


async def post(address: Address, roots: Path, certificate: Issued | None, key: str | None = None) -> httpx.Response:
    context = ssl.create_default_context(cafile=str(roots))
    if certificate is not None:
        context.load_cert_chain(certificate.certificate, certificate.key)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(verify=context, base_url=f"https://127.0.0.1:{address.http_port}") as http:
        return await http.post("/v1/completions", json=BODY, headers=headers)


def channel_credentials(roots: Path, certificate: Issued | None) -> grpc.ChannelCredentials:
    if certificate is None:
        return grpc.ssl_channel_credentials(roots.read_bytes())
    chain = certificate.key.read_bytes(), certificate.certificate.read_bytes()
    return grpc.ssl_channel_credentials(roots.read_bytes(), *chain)


async def generate(address: Address, roots: Path, certificate: Issued | None, key: str | None = None) -> None:
    metadata = None if key is None else (("authorization", f"Bearer {key}"),)
    async with grpc.aio.secure_channel(address.target, channel_credentials(roots, certificate)) as channel:
        request = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=2))
        assert [each async for each in InferenceStub(channel).Generate(request, timeout=5, metadata=metadata)]


async def test_a_certificate_alone_names_the_tenant(
    settings: Callable[..., Settings],
    ours: Authority,
    client: Issued,
    strangers: list[Issued | None],
    engine: SyntheticEngine,
) -> None:
    async with running_address(settings(api_keys=None)) as address:
        made = await post(address, ours.file, client, "EMPTY")  # no key is asked for, and libraries send one
        assert (made.status_code, engine.claimed[-1].tenant) == (200, "team-a")
        await generate(address, ours.file, client)
        assert engine.claimed[-1].tenant == "team-a"
        for stranger in strangers:
            with pytest.raises(REFUSED):
                await post(address, ours.file, stranger)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(address, ours.file, stranger)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_key_goes_before_a_certificate(
    settings: Callable[..., Settings], ours: Authority, client: Issued, engine: SyntheticEngine
) -> None:
    async with running_address(settings()) as address:
        for key, tenant in (("key-b", "b"), (None, "team-a")):
            assert (await post(address, ours.file, client, key)).status_code == 200
            assert engine.claimed[-1].tenant == tenant
            await generate(address, ours.file, client, key)
            assert engine.claimed[-1].tenant == tenant
        assert (await post(address, ours.file, client, "wrong")).status_code == 401
        nameless = ours.client("nameless", common_names=["x"])
        assert (await post(address, ours.file, nameless)).status_code == 401
        assert (await post(address, ours.file, nameless, "key-b")).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(address, ours.file, nameless)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.usefixtures("engine")
async def test_where_certificates_are_optional_a_key_does(
    settings: Callable[..., Settings], ours: Authority, client: Issued, strangers: list[Issued | None]
) -> None:
    async with running_address(settings(tls_client_certificates="optional")) as address:
        assert (await post(address, ours.file, client)).status_code == 200
        assert (await post(address, ours.file, None, "key-b")).status_code == 200
        assert (await post(address, ours.file, None)).status_code == 401
        await generate(address, ours.file, None, "key-b")
        for stranger in strangers[:-1]:
            with pytest.raises(REFUSED):
                await post(address, ours.file, stranger, "key-b")


@pytest.mark.usefixtures("engine")
async def test_an_authority_that_is_taken_away_lets_nobody_in_any_more(
    settings: Callable[..., Settings], ours: Authority, tmp_path: Path, client: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagestream_gateway.tls._RELOAD_PERIOD_S", 0.05)
    other, trusted = Authority(tmp_path, "next"), tmp_path / "trusted"
    new = other.client("new", uris=["spiffe://prod.test/ns/team-b/sa/web"])
    trusted.write_bytes(ours.file.read_bytes())
    async with running_address(settings(tls_client_ca=trusted)) as address:
        assert (await post(address, ours.file, client)).status_code == 200
        trusted.write_bytes(other.file.read_bytes())
        for _ in range(500):
            try:
                await post(address, ours.file, client)
            except REFUSED:
                break
        else:
            pytest.fail("the old authority stays trusted")
        assert (await post(address, ours.file, new)).status_code == 200
        await generate(address, ours.file, new)
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(address, ours.file, client)


def test_the_loop_that_serves_takes_the_latest_authorities(ours: Authority, client: Issued, tmp_path: Path) -> None:
    """Other tests run in asyncio's own loop."""
    server, trusted = ours.server(), tmp_path / "trusted"
    trusted.write_bytes(ours.file.read_bytes())
    held = Certificate(server.certificate, server.key, trusted)
    found = asyncio.Queue[bytes | None]()

    async def note_client(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await found.put(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        writer.write(b"x")
        writer.close()

    async def read(port: int) -> bytes:
        context = ssl.create_default_context(cafile=str(ours.file))
        context.load_cert_chain(client.certificate, client.key)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            return await reader.read(1)
        except (ssl.SSLError, ConnectionError):
            return b""
        finally:
            writer.close()

    async def run() -> None:
        async with await asyncio.start_server(note_client, "127.0.0.1", 0, ssl=held.context) as listening:
            port = listening.sockets[0].getsockname()[1]
            assert await read(port) == b"x"
            assert await found.get() == ssl.PEM_cert_to_DER_cert(client.pem)
            trusted.write_bytes(Authority(tmp_path, "next").file.read_bytes())
            assert held.refresh()
            assert await read(port) == b""

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
