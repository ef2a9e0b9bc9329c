import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm
from pagestream_gateway.core.identities.key_sets import KeySetError, parse_key_set
from support.network.token_issuer import Signer, key_set, private_key


def test_each_key_has_the_algorithms_of_its_kind() -> None:
    signers = [Signer(kid=name, algorithm=name) for name in ("RS256", "ES256", "ES384", "EdDSA")]
    keys = parse_key_set(key_set(*signers))
    assert {name: "RS256" in key.algorithms for name, key in keys.keys.items()} == {
        "RS256": True,
        "ES256": False,
        "ES384": False,
        "EdDSA": False,
    }
    for name in ("ES256", "ES384", "EdDSA"):
        found = keys.find(name)
        assert found is not None
        assert found.algorithms == {name}
    assert keys.find(None) is None
    assert keys.find("es256") is None


def test_a_key_that_names_its_algorithm_has_no_other() -> None:
    keys = parse_key_set(json.dumps({"keys": [Signer().jwk(alg="PS256")]}).encode())
    found = keys.find(None)
    assert found is not None
    assert found.algorithms == {"PS256"}


def test_of_a_private_key_the_public_half_is_held() -> None:
    private = {**RSAAlgorithm.to_jwk(private_key("RS256"), as_dict=True), "key_ops": ["sign", "verify"]}
    assert "d" in private
    found = parse_key_set(json.dumps({"keys": [private]}).encode()).find(None)
    assert found is not None
    assert isinstance(found.key, rsa.RSAPublicKey)


def weak_key() -> dict[str, Any]:
    public = rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()  # noqa: S505
    return dict(RSAAlgorithm.to_jwk(public, as_dict=True))


@pytest.mark.parametrize(
    "entry",
    [
        {"kty": "oct", "k": "c2VjcmV0"},
        {"kty": "RSA", "n": "AQAB"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"},
        Signer().jwk(use="enc"),
        Signer().jwk(key_ops=["sign"]),
        Signer().jwk(alg="HS256"),
        weak_key(),
        "text",
    ],
)
def test_other_keys_are_left_out(entry: Any) -> None:
    with pytest.raises(KeySetError, match="no key for signatures"):
        parse_key_set(json.dumps({"keys": [entry]}).encode())
    assert len(parse_key_set(json.dumps({"keys": [entry, Signer(kid="good").jwk()]}).encode()).keys) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"keys": {}}',
        b"[" * 100_000,
        b'{"keys": [' + b"{}," * 300 + b"{}]}",
        b" " * (256 * 1024 + 1),
        key_set(Signer(), Signer(number=1)),
    ],
)
def test_what_is_no_key_set_is_refused(data: bytes) -> None:
    with pytest.raises(KeySetError):
        parse_key_set(data)
