"""Tokens with real signatures, over both APIs and by OpenAI's client: what is accepted, and what attackers try."""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import RSAAlgorithm
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import GatewaySettings, Settings, SettingsError, running_gateway
from support.clients.gateway_clients import Address, bearer, gateway_settings, grpc_stub, running_address, write_keys
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.network.token_issuer import (
    AUDIENCE,
    ISSUER,
    KeyServer,
    Signer,
    forged,
    key_set,
    private_key,
    running_key_server,
)
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
SIGNER = Signer()
OTHER = Signer(number=2)
"""Of another issuer; both use one kid."""
SIGNERS = [Signer(kid=name, algorithm=name) for name in ("PS256", "ES256", "ES384", "EdDSA")]
NOW = int(time.time())
Another = Callable[[Settings], AbstractAsyncContextManager[Address]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the files are."""
    return tmp_path_factory.mktemp("issuers")


def issuer(name: str, **more: Any) -> dict[str, Any]:
    """Return the entry of an issuer."""
    return {"issuer": name, "audiences": [AUDIENCE], "tenant_claim": "tenant", **more}


def guarded(redis_url: str, folder: Path, *issuers: dict[str, Any]) -> Settings:
    """Return the settings of a gateway that trusts these issuers, and has administrators and keys."""
    file = folder / "issuers"
    file.write_text(json.dumps({"issuers": issuers}))
    base = gateway_settings(redis_url, keys=write_keys(folder / "keys", {"key-b": "b"}))
    administrators = write_keys(folder / "administrators", {"root": "olga"})
    return replace(base, gateway=replace(base.gateway, jwt_issuers=file, admin_keys=administrators))


@pytest.fixture(scope="module")
def settings(redis_url: str, folder: Path) -> Settings:
    for name, signers in (("main", [SIGNER]), ("other", [OTHER]), ("all", [SIGNER, *SIGNERS])):
        (folder / name).write_bytes(key_set(*signers))
    file = {"jwks_file": str(folder / "main")}
    return guarded(
        redis_url,
        folder,
        issuer(ISSUER, **file, algorithms=["RS256", "ES256"]),
        issuer("https://all.test", jwks_file=str(folder / "all"), leeway_s=0.0),
        issuer("https://other.test", jwks_file=str(folder / "other"), audiences=["x"], tenant_prefix="other."),
        issuer("https://mapped.test", **file, tenants={"Team": "a"}, tenant_prefix="corp."),
        issuer("https://classes.test", **file, class_claim="realm.roles", classes={"gold": 0, "silver": 1}),
        issuer("https://paths.test", **file, tenant_claim="a.c.d.e"),
        issuer("https://required.test", **file, required_claims={"verified": True, "groups": ["inference", "admin"]}),
    )


async def accepted(http: httpx.AsyncClient, engine: SyntheticEngine, token: str) -> tuple[str, str, int]:
    """Return tenant, credential and class of a request with this token."""
    answer = await http.post("/v1/completions", json=BODY, headers=bearer(token))
    assert answer.status_code == 200, answer.text
    return engine.claimed[-1].tenant, engine.claimed[-1].credential, engine.claimed[-1].priority


async def refusal(http: httpx.AsyncClient, token: str | bytes) -> str:
    """Return why a token is refused, twice: what was refused is not remembered as good."""
    given = token if isinstance(token, bytes) else token.encode()
    for _ in range(2):
        answer = await http.get("/v1/models", headers={"Authorization": b"Bearer " + given})
        assert answer.status_code == 401, (token, answer.text)
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    return str(answer.json()["error"]["message"])


async def reload(http: httpx.AsyncClient) -> list[bool]:
    """Let the gateway read all files and addresses again; return what has changed."""
    answer = await http.post("/admin/v1/keys/reload", headers=bearer("root"))
    assert answer.status_code == 200, answer.text
    return [each["changed"] for each in answer.json()["data"]]


async def test_a_good_token_names_its_tenant(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    token = SIGNER.token(aud=["other", AUDIENCE], nbf=NOW - 5)
    for _ in range(2):
        assert (await accepted(http, engine, token))[:2] == ("a", f"{ISSUER} u1")
    for signer in SIGNERS:
        token = signer.token(iss="https://all.test")
        if signer.algorithm == "ES384":
            await refusal(http, token)  # is not among the algorithms that are taken by default
        else:
            assert (await accepted(http, engine, token))[1] == "https://all.test u1"


def hmac_of(key: bytes) -> Callable[[bytes], bytes]:
    return lambda data: hmac.digest(key, data, hashlib.sha256)


PUBLIC = private_key("RS256", 0).public_key()
PEM = PUBLIC.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
DER = PUBLIC.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
CLAIMS = {"iss": ISSUER, "aud": AUDIENCE, "sub": "u1", "exp": NOW + 600, "tenant": "a"}
FORGED: dict[str, str | bytes] = {
    "none": forged({"alg": "none", "kid": "one"}, CLAIMS),
    "None": forged({"alg": "None", "kid": "one"}, CLAIMS),
    "empty": forged({"alg": "", "kid": "one"}, CLAIMS),
    "no alg": forged({"kid": "one"}, CLAIMS),
    "list": forged({"alg": ["RS256"], "kid": "one"}, CLAIMS),
    "HS256 with the PEM": forged({"alg": "HS256", "kid": "one"}, CLAIMS, hmac_of(PEM)),
    "HS256 with the DER": forged({"alg": "HS256", "kid": "one"}, CLAIMS, hmac_of(DER)),
    "no signature": forged({"alg": "RS256", "kid": "one"}, CLAIMS),
    "a key in the header": Signer(number=7).token({"jwk": Signer(number=7).jwk(), "jku": "http://127.0.0.1:1/"}),
    "another's kid": Signer(number=7).token(),
    "ES256 by an RSA key's kid": Signer(algorithm="ES256").token(),
    "PS256 is not asked for": Signer(algorithm="PS256").token(),
    "unknown kid": Signer(kid="two").token(),
    "kid is a number": forged({"alg": "RS256", "kid": 1}, CLAIMS),
    "kid is a path": SIGNER.token({"kid": "../../../dev/null"}),
    "crit": SIGNER.token({"crit": ["exp"]}),
    "expired": SIGNER.token(exp=NOW - 31),
    "exp is a text": SIGNER.token(exp=str(NOW + 60) + "x"),
    "no exp": SIGNER.token(exp=None),
    "endless": forged({"alg": "RS256", "kid": "one"}, CLAIMS | {"exp": 1e400}),
    "not yet": SIGNER.token(nbf=NOW + 3000),
    "wrong aud": SIGNER.token(aud="other"),
    "wrong auds": SIGNER.token(aud=["other", AUDIENCE + "x"]),
    "no aud": SIGNER.token(aud=None),
    "wrong iss": SIGNER.token(iss=ISSUER + "/"),
    "iss in a list": forged({"alg": "RS256"}, CLAIMS | {"iss": [ISSUER]}),
    "no sub": SIGNER.token(sub=None),
    "long sub": SIGNER.token(sub="x" * 256),
    "sub with a line break": SIGNER.token(sub="x\ny"),
    "no tenant": SIGNER.token(tenant=None),
    "tenant is a list": SIGNER.token(tenant=["a"]),
    "tenant with an accent": SIGNER.token(tenant="\N{CYRILLIC SMALL LETTER A}"),
    "tenant in full width": SIGNER.token(tenant="\N{FULLWIDTH LATIN SMALL LETTER A}"),
    "tenant with a blank": SIGNER.token(tenant="a "),
    "tenant with a null": SIGNER.token(tenant="a\0"),
    "20 kB": SIGNER.token(more="x" * 15_000),
    "deep": "eyJhbGciOiJSUzI1NiJ9." + "W1tb" * 3_000 + ".",
    "dots": "..",
    "latin": b"\xff.\xff.\xff",
    "the other issuer's": OTHER.token(),
    "of the other issuer": SIGNER.token(iss="https://other.test", aud="x"),
    "the other issuer's audience": OTHER.token(iss="https://other.test"),
}


async def test_what_attackers_try(http: httpx.AsyncClient) -> None:
    for kind, token in FORGED.items():
        text = await refusal(http, token)
        assert ISSUER not in text, kind
        assert isinstance(token, bytes) or token[:8] not in text, kind


async def test_names_of_tenants_are_exact(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    async def tenant(token: str) -> str:
        return (await accepted(http, engine, token))[0]

    assert await tenant(SIGNER.token(tenant="A")) == "A"
    assert await tenant(OTHER.token(iss="https://other.test", aud="x")) == "other.a"
    mapped = {"iss": "https://mapped.test"}
    assert await tenant(SIGNER.token(tenant="Team", **mapped)) == "corp.a"
    for other in ("team", "TEAM", "a", "corp.a"):
        await refusal(http, SIGNER.token(tenant=other, **mapped))
    paths = {"iss": "https://paths.test", "tenant": None}
    assert await tenant(SIGNER.token(a={"b": "x", "c.d": {"e": "inner"}}, **paths)) == "inner"
    assert await tenant(SIGNER.token(**paths, **{"a.c.d.e": "own"})) == "own"
    await refusal(http, SIGNER.token(a="text", **paths))


async def test_claims_give_the_class_and_may_be_required(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    classes = {"iss": "https://classes.test"}
    for roles, expected in (("gold", 0), (["x", "silver"], 1), (["silver", "gold"], 0), ("Gold", 2), (None, 2), (0, 2)):
        assert (await accepted(http, engine, SIGNER.token(realm={"roles": roles}, **classes)))[2] == expected
    assert (await accepted(http, engine, SIGNER.token(**classes)))[2] == 2
    required = {"iss": "https://required.test"}
    await accepted(http, engine, SIGNER.token(verified=True, groups=["x", "inference"], **required))
    for claims in ({}, {"verified": True}, {"verified": 1, "groups": "inference"}, {"verified": True, "groups": ["x"]}):
        assert "required" in await refusal(http, SIGNER.token(**claims, **required))


async def test_a_token_that_was_good_ends_with_its_time(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    token = SIGNER.token(iss="https://all.test", exp=int(time.time()) + 4)
    await accepted(http, engine, token)

    async def has_ended() -> bool:
        return await status_of(http, token) == 401

    await eventually(has_ended)
    assert "expired" in await refusal(http, token)


def weak_key() -> dict[str, Any]:
    public = rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()  # noqa: S505
    return dict(RSAAlgorithm.to_jwk(public, as_dict=True))


OTHER_KEYS: list[Any] = [
    {"kty": "oct", "k": "c2VjcmV0"},
    {"kty": "RSA", "n": "AQAB"},
    {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"},
    Signer().jwk(use="enc"),
    Signer().jwk(key_ops=["sign"]),
    Signer().jwk(alg="HS256"),
    weak_key(),
    "text",
]
NO_SETS = [
    b"",
    b"[]",
    b"\xff",
    b'{"keys": {}}',
    b"[" * 100_000,
    b'{"keys": [' + b"{}," * 300 + b"{}]}",
    b" " * (256 * 1024 + 1),
    key_set(Signer(), Signer(number=1)),
    *(json.dumps({"keys": [entry]}).encode() for entry in OTHER_KEYS),
]


async def test_keys_change_with_their_file_and_wrong_ones_are_left_out(
    http: httpx.AsyncClient, engine: SyntheticEngine, folder: Path
) -> None:
    file, new = folder / "main", Signer(kid="new", number=3)
    try:
        for wrong in NO_SETS:
            file.write_bytes(wrong)
            assert not any(await reload(http)), wrong
        await accepted(http, engine, SIGNER.token())
        file.write_bytes(json.dumps({"keys": [*OTHER_KEYS, new.jwk()]}).encode())
        assert any(await reload(http))
        await accepted(http, engine, new.token())
        await refusal(http, SIGNER.token(jti="not seen before"))
        private = RSAAlgorithm.to_jwk(private_key("RS256", 0), as_dict=True)
        file.write_bytes(json.dumps({"keys": [{**private, "kid": "one", "key_ops": ["sign", "verify"]}]}).encode())
        assert any(await reload(http))
        await refusal(http, new.token())
        await accepted(http, engine, SIGNER.token())
        file.write_bytes(json.dumps({"keys": [SIGNER.jwk(alg="PS256")]}).encode())
        assert any(await reload(http))
        await refusal(http, SIGNER.token(jti="RS256"))
    finally:
        file.write_bytes(key_set(SIGNER))
        await reload(http)


async def test_openais_client_with_a_token(gateway: Address, engine: SyntheticEngine) -> None:
    token = SIGNER.token(realm={"roles": "silver"}, iss="https://classes.test")
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=token, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=3, stream=True
        )
        assert [chunk async for chunk in stream]
    assert (engine.claimed[-1].tenant, engine.claimed[-1].priority) == ("a", 1)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=SIGNER.token(aud="x"), max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="another audience"):
            await client.models.list()


async def test_tokens_and_keys_are_used_together_and_share_their_tenants(http: httpx.AsyncClient) -> None:
    made = await http.post("/v1/completions", json=BODY, headers=bearer("key-b"))
    for tenant, expected in (("b", 200), ("a", 404), ("B", 404)):
        path = f"/v1/requests/{made.headers['X-Request-Id']}"
        assert (await http.get(path, headers=bearer(SIGNER.token(tenant=tenant)))).status_code == expected


async def test_grpc_takes_tokens(gateway: Address, engine: SyntheticEngine) -> None:
    request = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=2))
    async with grpc_stub(gateway, key=SIGNER.token()) as stub:
        assert [chunk async for chunk in stub.Generate(request, timeout=LIMIT_S)]
    assert engine.claimed[-1].tenant == "a"
    async with grpc_stub(gateway, key=SIGNER.token(exp=1)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(api.ListModelsRequest(), timeout=LIMIT_S)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAUTHENTICATED, "the token has expired")


OLD, NEW = Signer(kid="old"), Signer(kid="new", number=1)


@asynccontextmanager
async def asking(redis_url: str, folder: Path, url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Run a gateway that gets its issuer's keys from an address."""
    async with running_address(guarded(redis_url, folder, issuer(ISSUER, jwks_url=url))) as address:
        async with httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client:
            yield client


async def status_of(http: httpx.AsyncClient, token: str) -> int:
    return (await http.get("/v1/models", headers=bearer(token))).status_code


@pytest_asyncio.fixture(loop_scope="module")
async def served(redis_url: str, tmp_path: Path) -> AsyncIterator[tuple[KeyServer, httpx.AsyncClient]]:
    with running_key_server(OLD) as server:
        async with asking(redis_url, tmp_path, server.url) as client:
            yield server, client


async def test_a_new_key_is_fetched_at_once_and_a_flood_of_unknown_ones_once(
    served: tuple[KeyServer, httpx.AsyncClient],
) -> None:
    server, client = served
    assert await status_of(client, OLD.token()) == 200
    server.body = key_set(OLD, NEW)
    assert set(await asyncio.gather(*(status_of(client, NEW.token()) for _ in range(10)))) == {200}
    assert server.num_fetches <= 3
    before = server.num_fetches
    flood = (status_of(client, Signer(kid=f"flood {number}", number=5).token()) for number in range(40))
    assert set(await asyncio.gather(*flood)) == {401}
    assert server.num_fetches <= before + 1


async def test_keys_stay_while_their_address_fails(served: tuple[KeyServer, httpx.AsyncClient]) -> None:
    server, client = served
    assert await status_of(client, OLD.token()) == 200
    for status, body, headers in (
        (500, b"", {}),
        (302, b"", {"Location": server.url}),
        (200, b"{}", {}),
        (200, key_set(NEW), {"Content-Encoding": "gzip"}),
        (200, key_set(NEW)[:-9], {"Content-Length": "100000"}),
    ):
        server.status, server.body, server.headers = status, body, headers
        before = server.num_fetches
        assert not any(await reload(client))
        assert server.num_fetches > before
        assert await status_of(client, NEW.token()) == 401
        assert await status_of(client, OLD.token(jti=str(status))) == 200


async def test_without_the_issuers_keys_callers_are_asked_to_try_again(redis_url: str, tmp_path: Path) -> None:
    """Also where the set is huge, of which little is read."""
    with running_key_server(OLD) as server:
        good, server.body = server.body, b'{"keys": [' + b" " * 100_000_000
        async with asking(redis_url, tmp_path, server.url) as client:
            answer = await client.get("/v1/models", headers=bearer(OLD.token()))
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
            assert answer.json()["error"]["code"] == "credentials_unavailable"
            assert server.num_sent < 16_000_000  # what the sockets hold
            server.body = good
            await reload(client)
            assert await status_of(client, OLD.token()) == 200


async def test_a_silent_address_holds_a_call_for_a_bounded_time(redis_url: str, tmp_path: Path) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1024):
            pass
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with silent, asking(redis_url, tmp_path, f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/") as client:
        assert await status_of(client, OLD.token()) == 503


GOOD = issuer("https://issuer.test", jwks_url="https://issuer.test/keys")
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"jwks_url": "http://issuer.test/keys"}, "must be https"),
    ({"jwks_url": "http://127.0.0.1.evil.test/keys"}, "must be https"),
    ({"jwks_url": "file:///etc/passwd"}, "must be https"),
    ({"jwks_url": "https://user:password@issuer.test/keys"}, "without a password"),
    ({"jwks_file": "keys"}, "either jwks_url or jwks_file"),
    ({"jwks_url": None}, "either jwks_url or jwks_file"),
    ({"algorithms": ["HS256"]}, "issuers.0.algorithms.0"),
    ({"algorithms": ["none"]}, "issuers.0.algorithms.0"),
    ({"algorithms": []}, "issuers.0.algorithms"),
    ({"audiences": []}, "issuers.0.audiences"),
    ({"audience": "x"}, "issuers.0.audience"),
    ({"tenant_claim": ""}, "issuers.0.tenant_claim"),
    ({"tenants": {"x": "a/b"}}, "not a tenant name"),
    ({"tenant_prefix": "-"}, "can't begin"),
    ({"class_claim": "c", "classes": {"gold": 3}}, "got 3"),
    ({"classes": {"gold": 0}}, "goes with class_claim"),
    ({"leeway_s": 3600}, "issuers.0.leeway_s"),
]


async def test_what_is_wrong_in_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "issuers"
    for given, expected in [*(([GOOD | change], expected) for change, expected in WRONG), ([GOOD, GOOD], "twice")]:
        file.write_text(json.dumps({"issuers": given}))
        with pytest.raises(SettingsError, match="--jwt-issuers") as caught:
            async with running_gateway(Settings(gateway=GatewaySettings(jwt_issuers=file))):
                pytest.fail("the gateway starts")
        assert expected in str(caught.value)
