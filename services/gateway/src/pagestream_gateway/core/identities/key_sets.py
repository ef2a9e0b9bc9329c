"""Public keys of an issuer, from a JSON Web Key Set (RFC 7517)."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

logger = logging.getLogger(__name__)

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey
MAX_SET_BYTES = 256 * 1024
"""Bytes of a key set; one with ten keys and their certificates has 20 kB."""
_MAX_KEYS = 256
_MIN_RSA_BITS, _MAX_RSA_BITS = 2048, 8192  # checking a signature takes time with the square of the bits
_RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_CURVES = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}


class KeySetError(Exception):
    """What was read is not a usable key set. The message says why."""


@dataclass(frozen=True)
class VerificationKey:
    """One public key, and the algorithms that it may be used with."""

    key: PublicKey
    algorithms: frozenset[str]


@dataclass(frozen=True)
class KeySet:
    """An issuer's keys at one time."""

    keys: Mapping[str, VerificationKey]
    """By `kid`; "" is that of the only key, where it has none."""
    digest: bytes
    """Of what they were read from."""

    def find(self, kid: str | None) -> VerificationKey | None:
        """Return the key that a token names; of a token that names none the only one."""
        if kid is not None:
            return self.keys.get(kid)
        return next(iter(self.keys.values())) if len(self.keys) == 1 else None


def parse_key_set(data: bytes) -> KeySet:
    """Return the keys of a set for signatures. Raises KeySetError where there is none, or two have one `kid`.

    Keys of other kinds and for other uses are left out, as the RFC asks; of private keys only the public half is held.
    """
    if len(data) > MAX_SET_BYTES:
        raise KeySetError(f"more than {MAX_SET_BYTES} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise KeySetError("not JSON") from error
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list) or len(listed) > _MAX_KEYS:
        raise KeySetError(f'an object with "keys", a list of at most {_MAX_KEYS}, is expected')
    keys: dict[str, VerificationKey] = {}
    for entry in listed:
        found = _verification_key(entry) if isinstance(entry, dict) else None
        if found is None:
            continue
        kid = entry.get("kid", "")
        if not isinstance(kid, str) or kid in keys:
            raise KeySetError("each key needs a kid of its own, where there are several")
        keys[kid] = found
    if not keys:
        raise KeySetError("no key for signatures with RSA (2048 bits or more), P-256, P-384, P-521 or Ed25519")
    if "" in keys and len(keys) > 1:
        raise KeySetError("each key needs a kid of its own, where there are several")
    return KeySet(keys, hashlib.sha256(data).digest())


def _verification_key(entry: Mapping[str, Any]) -> VerificationKey | None:
    """Return a key of the set, None for one that is of another kind or use."""
    operations = entry.get("key_ops")
    if entry.get("use", "sig") != "sig" or (isinstance(operations, list) and "verify" not in operations):
        return None
    try:
        found = _public_key(entry)
    except (jwt.InvalidKeyError, ValueError, TypeError, KeyError) as error:
        logger.warning("a key of a key set is left out: %s", type(error).__name__)
        return None
    if found is None:
        return None
    algorithm = entry.get("alg")
    if algorithm is None:
        return found
    if algorithm not in found.algorithms:
        return None
    return VerificationKey(found.key, frozenset({algorithm}))


def _public_key(entry: Mapping[str, Any]) -> VerificationKey | None:
    kind, curve = entry.get("kty"), entry.get("crv")
    if kind == "RSA":
        key: Any = RSAAlgorithm.from_jwk(_members(entry, "n", "e"))
        is_fit = _MIN_RSA_BITS <= key.key_size <= _MAX_RSA_BITS
        return VerificationKey(key, _RSA) if is_fit else None
    if kind == "EC" and curve in _CURVES:
        key = ECAlgorithm.from_jwk(_members(entry, "crv", "x", "y"))
        return VerificationKey(key, frozenset({_CURVES[curve]}))
    if kind == "OKP" and curve == "Ed25519":
        key = OKPAlgorithm.from_jwk(_members(entry, "crv", "x"))
        return VerificationKey(key, frozenset({"EdDSA"}))
    return None


def _members(entry: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {"kty": entry["kty"], **{name: entry[name] for name in names}}
