"""Tokens with real signatures: what is accepted, and what attackers try."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pagestream_gateway.core.identities.identity import Identity
from pagestream_gateway.core.identities.issuers import Issuer
from pagestream_gateway.core.identities.tokens import Tokens
from pagestream_gateway.errors import Unauthenticated
from support.network.token_issuer import AUDIENCE, ISSUER, Signer, forged, key_set, private_key

SIGNER = Signer()
NOW = int(time.time())


@pytest.fixture
def checker(tmp_path: Path) -> Callable[..., Tokens]:
    def make(*signers: Signer, **more: Any) -> Tokens:
        file = tmp_path / "keys"
        file.write_bytes(key_set(*(signers or (SIGNER,))))
        return Tokens([issuer(file, **more)])

    return make


def issuer(file: Path, **more: Any) -> Issuer:
    given = {"issuer": ISSUER, "audiences": [AUDIENCE], "tenant_claim": "tenant", "jwks_file": str(file)}
    return Issuer(**{**given, **more})


async def refused(tokens: Tokens, token: str) -> str:
    for _ in range(2):  # what was refused is not remembered as good
        with pytest.raises(Unauthenticated) as caught:
            await tokens.identity(token)
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "EdDSA"])
async def test_a_good_token_names_its_tenant(checker: Callable[..., Tokens], algorithm: str) -> None:
    signer = Signer(algorithm=algorithm)
    tokens = checker(signer)
    token = signer.token(aud=["other", AUDIENCE], nbf=NOW - 5)
    for _ in range(2):
        assert await tokens.identity(token) == Identity("a", f"{ISSUER} u1")


def hmac_of(key: bytes) -> Callable[[bytes], bytes]:
    return lambda data: hmac.digest(key, data, hashlib.sha256)


PUBLIC = private_key("RS256").public_key()
PEM = PUBLIC.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
DER = PUBLIC.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
CLAIMS = {"iss": ISSUER, "aud": AUDIENCE, "sub": "u1", "exp": NOW + 600, "tenant": "a"}
FORGED = {
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
    "not yet": SIGNER.token(nbf=NOW + 300),
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
    "30 kB": SIGNER.token(more="x" * 22_000),
    "deep": "eyJhbGciOiJSUzI1NiJ9." + "W1tb" * 3_000 + ".",
    "dots": "..",
    "latin": "\xff.\xff.\xff",
    "surrogate": "\udcff.a.b",
}


@pytest.mark.parametrize("kind", FORGED)
async def test_what_attackers_try(checker: Callable[..., Tokens], kind: str) -> None:
    text = await refused(checker(algorithms=["RS256", "ES256"]), FORGED[kind])
    assert ISSUER not in text
    assert FORGED[kind][:8] not in text


async def test_names_of_tenants_are_exact(checker: Callable[..., Tokens]) -> None:
    assert (await checker().identity(SIGNER.token(tenant="A"))).tenant == "A"
    mapped = checker(tenants={"Team": "a"}, tenant_prefix="corp.")
    assert (await mapped.identity(SIGNER.token(tenant="Team"))).tenant == "corp.a"
    for other in ("team", "TEAM", "a", "corp.a"):
        await refused(mapped, SIGNER.token(tenant=other))


async def test_two_issuers_have_their_own_keys(tmp_path: Path) -> None:
    """Both use one kid: a token is checked with the keys of the issuer that it names."""
    first, second = Signer(number=1), Signer(number=2)
    for number, signer in enumerate((first, second)):
        (tmp_path / f"keys{number}").write_bytes(key_set(signer))
    other = "https://other.test"
    tokens = Tokens(
        [issuer(tmp_path / "keys0"), issuer(tmp_path / "keys1", issuer=other, tenant_prefix="other.", audiences=["x"])]
    )
    assert (await tokens.identity(first.token())).tenant == "a"
    assert (await tokens.identity(second.token(iss=other, aud="x"))).tenant == "other.a"
    for wrong in (second.token(), first.token(iss=other, aud="x"), second.token(iss=other)):
        await refused(tokens, wrong)


async def test_claims_give_the_class(checker: Callable[..., Tokens]) -> None:
    tokens = checker(class_claim="realm.roles", classes={"gold": 0, "silver": 1})
    for roles, expected in (("gold", 0), (["x", "silver"], 1), (["silver", "gold"], 0), ("Gold", 2), (None, 2), (0, 2)):
        assert (await tokens.identity(SIGNER.token(realm={"roles": roles}))).best_class == expected
    assert (await tokens.identity(SIGNER.token())).best_class == 2
    assert (await checker().identity(SIGNER.token())).best_class is None


async def test_claims_that_are_required(checker: Callable[..., Tokens]) -> None:
    tokens = checker(required_claims={"verified": True, "groups": ["inference", "admin"]})
    await tokens.identity(SIGNER.token(verified=True, groups=["x", "inference"]))
    for claims in ({}, {"verified": True}, {"verified": 1, "groups": "inference"}, {"verified": True, "groups": ["x"]}):
        assert "required" in await refused(tokens, SIGNER.token(**claims))


async def test_a_token_that_was_good_ends_with_its_time_and_its_key(
    checker: Callable[..., Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagestream_gateway.core.identities.key_sources._FILE_PERIOD_S", 0.02)
    tokens = checker(leeway_s=0.0)
    short, long = SIGNER.token(exp=int(time.time()) + 2), SIGNER.token()
    await tokens.identity(long)
    await tokens.identity(short)
    await until_refused(tokens, short)
    (watch,) = tokens.watches()
    watch.start()
    try:
        (tmp_path / "keys").write_bytes(b"{")
        await tokens.identity(long)
        (tmp_path / "keys").write_bytes(key_set(Signer(kid="new", number=3)))
        await until_refused(tokens, long)
        await tokens.identity(Signer(kid="new", number=3).token())
    finally:
        await watch.stop()


async def until_refused(tokens: Tokens, token: str) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await tokens.identity(token)
            except Unauthenticated:
                return
            await asyncio.sleep(0.01)
