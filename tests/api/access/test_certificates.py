"""TLS on both ports, certificates that are renewed, and client certificates: who gets in, and as whom."""

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_gateway import GatewaySettings, Settings, SettingsError, running_gateway
from support.clients.gateway_clients import (
    Address,
    bearer,
    gateway_settings,
    issue_certificate,
    running_address,
    write_keys,
)
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
REFUSED = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
WEB = "spiffe://prod.test/ns/team-a/sa/web"
RULES = """
# ours
URI:spiffe://prod.test/ns/{tenant}/sa/* -> {tenant}
DNS:{tenant}.Clients.test -> k8s.{tenant}
CN:batch runner -> research
CN:* -> others
"""


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in files."""

    certificate: Path
    key: Path


_SIGNS = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """Issues certificates; its own is in `file`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
        )
        builder = builder.add_extension(_SIGNS, critical=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def server(self) -> Issued:
        """Issue a certificate for the loopback address."""
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        return self._issue("server", ["localhost"], names, ExtendedKeyUsageOID.SERVER_AUTH)

    def client(
        self,
        file: str,
        *,
        common_names: Sequence[str] = (),
        uris: Sequence[str] = (),
        hosts: Sequence[str] = (),
        for_clients: bool = True,
    ) -> Issued:
        """Issue a client's certificate with these names."""
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [x509.DNSName(host) for host in hosts]
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if for_clients else ExtendedKeyUsageOID.SERVER_AUTH
        return self._issue(file, common_names, names, usage)

    def _issue(self, file: str, common_names: Sequence[str], names: list[Any], usage: x509.ObjectIdentifier) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each) for each in common_names])
        builder = self._builder(subject, key.public_key()).add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=not common_names)
        issued = Issued(self._folder / f"{file}.crt", self._folder / f"{file}.key")
        issued.certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        issued.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return issued

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - DAY)
            .not_valid_after(NOW + DAY)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the files are."""
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Authority:
    return Authority(folder, "ours")


@pytest.fixture(scope="module")
def client(ours: Authority) -> Issued:
    return ours.client("client", uris=[WEB])


@pytest.fixture(scope="module")
def strangers(folder: Path, ours: Authority) -> list[Issued | None]:
    """Clients that must not get in: of another authority, with a server's certificate, without any."""
    other = Authority(folder, "other").client("stranger", uris=[WEB])
    return [other, ours.client("no-client", uris=[WEB], for_clients=False), None]


@pytest.fixture(scope="module")
def make_settings(ours: Authority, redis_url: str, folder: Path) -> Callable[..., Settings]:
    server, rules = ours.server(), folder / "rules"
    rules.write_text(RULES)
    given = {
        "tls_certificate": server.certificate,
        "tls_key": server.key,
        "tls_client_ca": ours.file,
        "tls_client_tenants": rules,
        "api_keys": write_keys(folder / "keys", {"key-b": "b"}),
        "admin_keys": write_keys(folder / "administrators", {"root": "olga"}),
    }

    def make(**more: object) -> Settings:
        base = gateway_settings(redis_url)
        return replace(base, gateway=replace(base.gateway, **{**given, **more}))

    return make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(shared_engine: SyntheticEngine, make_settings: Callable[..., Settings]) -> AsyncIterator[Address]:
    """Run a gateway that asks for certificates and takes keys."""
    async with running_address(make_settings()) as address:
        yield address


async def post(address: Address, roots: Path, certificate: Issued | None, key: str | None = None) -> httpx.Response:
    context = ssl.create_default_context(cafile=str(roots))
    if certificate is not None:
        context.load_cert_chain(certificate.certificate, certificate.key)
    url = f"https://127.0.0.1:{address.http_port}"
    async with httpx.AsyncClient(verify=context, base_url=url, timeout=LIMIT_S) as http:
        if key == "root":
            return await http.post("/admin/v1/keys/reload", headers=bearer(key))
        return await http.post("/v1/completions", json=BODY, headers={} if key is None else bearer(key))


def channel_credentials(roots: Path, certificate: Issued | None) -> grpc.ChannelCredentials:
    if certificate is None:
        return grpc.ssl_channel_credentials(roots.read_bytes())
    chain = certificate.key.read_bytes(), certificate.certificate.read_bytes()
    return grpc.ssl_channel_credentials(roots.read_bytes(), *chain)


async def generate(address: Address, roots: Path, certificate: Issued | None, key: str | None = None) -> None:
    metadata = None if key is None else (("authorization", f"Bearer {key}"),)
    async with grpc.aio.secure_channel(address.target, channel_credentials(roots, certificate)) as channel:
        request = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=2))
        assert [each async for each in InferenceStub(channel).Generate(request, timeout=LIMIT_S, metadata=metadata)]


async def test_a_certificate_alone_names_the_tenant(
    make_settings: Callable[..., Settings],
    ours: Authority,
    client: Issued,
    strangers: list[Issued | None],
    engine: SyntheticEngine,
) -> None:
    async with running_address(make_settings(api_keys=None)) as address:
        made = await post(address, ours.file, client, "EMPTY")  # no key is asked for, and libraries send one
        assert (made.status_code, engine.claimed[-1].tenant) == (200, "team-a")
        await generate(address, ours.file, client)
        assert (engine.claimed[-1].tenant, engine.claimed[-1].credential) == ("team-a", f"URI:{WEB}")
        for stranger in strangers:
            with pytest.raises(REFUSED):
                await post(address, ours.file, stranger)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(address, ours.file, stranger)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_key_goes_before_a_certificate(
    guarded: Address, ours: Authority, client: Issued, engine: SyntheticEngine
) -> None:
    for key, tenant in (("key-b", "b"), (None, "team-a")):
        assert (await post(guarded, ours.file, client, key)).status_code == 200
        assert engine.claimed[-1].tenant == tenant
        await generate(guarded, ours.file, client, key)
        assert engine.claimed[-1].tenant == tenant
    assert (await post(guarded, ours.file, client, "wrong")).status_code == 401
    nameless = ours.client("nameless", common_names=["x", "y"])
    assert (await post(guarded, ours.file, nameless)).status_code == 401
    assert (await post(guarded, ours.file, nameless, "key-b")).status_code == 200
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(guarded, ours.file, nameless)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_the_first_rule_that_fits_a_name_holds(
    guarded: Address, ours: Authority, engine: SyntheticEngine
) -> None:
    names: dict[str, list[str]]
    for names, tenant in (
        ({"uris": [WEB], "common_names": ["batch runner"]}, "team-a"),
        ({"hosts": ["Team-B.clients.TEST"]}, "k8s.team-b"),
        ({"common_names": ["batch runner"]}, "research"),
        ({"common_names": ["Batch runner"]}, "others"),
    ):
        answer = await post(guarded, ours.file, ours.client("named", **names))  # type: ignore[arg-type]
        assert (answer.status_code, engine.claimed[-1].tenant) == (200, tenant)
    for names in (
        {},
        {"uris": ["spiffe://prod.test/ns/a/sa/web/x"]},
        {"uris": ["spiffe://prod.test/ns/a/b/sa/web"]},
        {"uris": ["spiffe://prod.test.evil/ns/a/sa/web"]},
        {"uris": ["spiffe://prodXtest/ns/a/sa/web"]},
        {"uris": ["SPIFFE://PROD.TEST/ns/a/sa/web"]},
        {"uris": ["spiffe://prod.test/ns/%61/sa/web"]},
        {"hosts": ["a.b.clients.test"]},
        {"hosts": ["clients.test"]},
        {"common_names": ["batch runner", "x"]},
        {"common_names": ["a.b"]},
        {"common_names": ["a\nb"]},
    ):
        answer = await post(guarded, ours.file, ours.client("named", **names))  # type: ignore[arg-type]
        assert answer.status_code == 401, names


async def test_changed_rules_hold_at_once_and_wrong_ones_not_at_all(
    guarded: Address, ours: Authority, client: Issued, engine: SyntheticEngine, folder: Path
) -> None:
    named = ours.client("runner", common_names=["batch runner"])
    for text, tenant in (("CN:batch runner -> b", "b"), ("CN:x", "b"), (RULES, "research")):
        (folder / "rules").write_text(text)
        assert (await post(guarded, ours.file, client, "root")).status_code == 200
        await post(guarded, ours.file, named)
        assert engine.claimed[-1].tenant == tenant


async def test_where_certificates_are_optional_a_key_does(
    engine: SyntheticEngine,
    make_settings: Callable[..., Settings],
    ours: Authority,
    client: Issued,
    strangers: list[Issued | None],
) -> None:
    async with running_address(make_settings(tls_client_certificates="optional")) as address:
        assert (await post(address, ours.file, client)).status_code == 200
        assert (await post(address, ours.file, None, "key-b")).status_code == 200
        assert (await post(address, ours.file, None)).status_code == 401
        await generate(address, ours.file, None, "key-b")
        for stranger in strangers[:-1]:
            with pytest.raises(REFUSED):
                await post(address, ours.file, stranger, "key-b")


async def under_uvloop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run in an event loop of the kind that serves; the engine stays in this one."""

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work())

    await asyncio.to_thread(run)


@pytest.mark.usefixtures("engine")
async def test_an_authority_that_is_taken_away_lets_nobody_in_any_more(
    make_settings: Callable[..., Settings],
    ours: Authority,
    tmp_path: Path,
    client: Issued,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagestream_gateway.tls._RELOAD_PERIOD_S", 0.05)
    other, trusted = Authority(tmp_path, "next"), tmp_path / "trusted"
    new = other.client("new", uris=["spiffe://prod.test/ns/team-b/sa/web"])
    trusted.write_bytes(ours.file.read_bytes())

    async def exchange() -> None:
        async with running_address(make_settings(tls_client_ca=trusted)) as address:
            assert (await post(address, ours.file, client)).status_code == 200
            trusted.write_bytes(other.file.read_bytes())

            async def is_refused() -> bool:
                try:
                    await post(address, ours.file, client)
                except REFUSED:
                    return True
                return False

            await eventually(is_refused)
            assert (await post(address, ours.file, new)).status_code == 200
            await generate(address, ours.file, new)
            with pytest.raises(grpc.aio.AioRpcError):
                await generate(address, ours.file, client)

    await under_uvloop(exchange)


WRONG_RULES = [
    ("# nothing\n", "holds no rule"),
    ("CN:a b", ":1: 'URI:pattern"),
    ("\nIP:1.2.3.4 -> a", ":2: 'URI:pattern"),
    ("CN: -> a", "is expected"),
    ("CN:{tenant} -> a", "stands once"),
    ("CN:a -> {tenant}", "stands once"),
    ("CN:{tenant}{tenant} -> {tenant}", "stands once"),
    ("CN:a -> b/c", "not a tenant name"),
]


async def test_a_wrong_rule_is_named(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    path = tmp_path / "rules"
    for text, expected in WRONG_RULES:
        path.write_text(text)
        with pytest.raises(SettingsError, match="tls_client_tenants") as caught:
            async with running_gateway(make_settings(tls_client_tenants=path)):
                pytest.fail("the gateway starts")
        assert expected in str(caught.value)


def with_tls(redis_url: str, files: tuple[Path, Path]) -> Settings:
    certificate, key = files
    return Settings(
        gateway=GatewaySettings(redis=redis_url, http_port=0, grpc_port=0, tls_certificate=certificate, tls_key=key)
    )


async def models_over_grpc(target: str, roots: bytes) -> list[str]:
    async with grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(roots)) as channel:
        answer = await InferenceStub(channel).ListModels(api.ListModelsRequest(), timeout=LIMIT_S)
        return [model.name for model in answer.models]


async def status_over_http(port: int, roots: Path) -> int:
    context = ssl.create_default_context(cafile=str(roots))
    async with httpx.AsyncClient(verify=context) as http:
        return (await http.get(f"https://127.0.0.1:{port}/v1/models")).status_code


async def test_both_apis_speak_tls_and_nothing_else(engine: SyntheticEngine, redis_url: str, tmp_path: Path) -> None:
    files = issue_certificate(tmp_path, 1)
    async with running_address(with_tls(redis_url, files)) as address:
        assert await status_over_http(address.http_port, files[0]) == 200
        assert await models_over_grpc(address.target, files[0].read_bytes()) == [MODEL]
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.HTTPError):
                await http.get(f"{address.url}/v1/models")
        async with grpc.aio.insecure_channel(address.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await InferenceStub(channel).ListModels(api.ListModelsRequest(), timeout=2)


async def test_a_renewed_certificate_is_taken_by_new_connections_and_one_that_does_not_fit_by_none(
    engine: SyntheticEngine,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pagestream_gateway.tls._RELOAD_PERIOD_S", 0.05)
    certificate, key = issue_certificate(tmp_path, 1)
    old = tmp_path / "old.crt"
    old.write_bytes(certificate.read_bytes())
    async with running_address(with_tls(redis_url, (certificate, key))) as address:
        assert await status_over_http(address.http_port, old) == 200
        key.write_bytes(b"no key")
        await eventually(lambda: "cannot use the certificate" in caplog.text)
        assert await status_over_http(address.http_port, old) == 200
        issue_certificate(tmp_path, 2)

        async def is_taken() -> bool:
            try:
                return await status_over_http(address.http_port, certificate) == 200
            except httpx.ConnectError:
                return False

        await eventually(is_taken)
        assert await models_over_grpc(address.target, certificate.read_bytes()) == [MODEL]
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await status_over_http(address.http_port, old)
        with pytest.raises(grpc.aio.AioRpcError):
            await models_over_grpc(address.target, old.read_bytes())


async def test_what_can_not_be_read_is_named_at_the_start(redis_url: str, tmp_path: Path) -> None:
    certificate, key = issue_certificate(tmp_path, 1)
    key.write_bytes(b"no key")
    for files, expected in (
        ((tmp_path / "nothing.crt", tmp_path / "nothing.key"), r"--tls-certificate .*nothing\.crt"),
        ((certificate, key), "--tls-key"),
    ):
        with pytest.raises(SettingsError, match=expected):
            async with running_gateway(with_tls(redis_url, files)):
                pytest.fail("the gateway starts")
