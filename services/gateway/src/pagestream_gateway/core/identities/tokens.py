"""JSON Web Tokens as credentials: signature, times and audience are checked, claims become an identity."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jwt
from pagestream_streams.tasks import Periodic

from pagestream_gateway.core.identities.identity import Identity, is_tenant
from pagestream_gateway.core.identities.issuers import Issuer, claim
from pagestream_gateway.core.identities.key_sets import KeySet, VerificationKey
from pagestream_gateway.core.identities.key_sources import KeySource, source_of
from pagestream_gateway.errors import CredentialsUnavailable, Unauthenticated

MAX_TOKEN_BYTES = 16 * 1024
"""Bytes of a token; with the groups of a large company it has 8 kB."""
_MAX_CACHED = 4096  # about 1 kB each
_MAX_SUBJECT = 255  # OpenID Connect Core, section 2
_REQUIRED = ["iss", "aud", "sub", "exp"]
# PyJWT raises the last three for numbers and nesting that no issuer writes.
_DECODE_ERRORS = (jwt.PyJWTError, ValueError, OverflowError, RecursionError)


class _Checked(NamedTuple):
    identity: Identity
    until: float
    """Unix seconds at which the token expires."""
    source: KeySource
    keys: KeySet
    """Those that it was checked with: others may lack its key."""


class Tokens:
    """Checks tokens of several issuers. Good ones are remembered by their digests until they expire."""

    def __init__(self, issuers: Sequence[Issuer]) -> None:
        """Raises SettingsError where an issuer's files can't be read."""
        self._issuers = {each.issuer: (each, source_of(each)) for each in issuers}
        self._checked: OrderedDict[bytes, _Checked] = OrderedDict()

    def watches(self) -> list[Periodic]:
        """Return the tasks that keep the keys up to date, once they are started."""
        return [source.watch() for _, source in self._issuers.values()]

    async def reload(self) -> bool:
        """Read or fetch the keys of all issuers now; return whether any have changed."""
        before = [source.current for _, source in self._issuers.values()]
        await asyncio.gather(*(source.reload() for _, source in self._issuers.values()))
        return any(old is not source.current for old, (_, source) in zip(before, self._issuers.values(), strict=True))

    async def identity(self, token: str) -> Identity:
        """Return whose token this is. Raises Unauthenticated, CredentialsUnavailable while there are no keys yet."""
        data = token.encode("utf-8", "surrogateescape")
        if len(data) > MAX_TOKEN_BYTES:
            raise Unauthenticated(f"the token has {len(data)} bytes, at most {MAX_TOKEN_BYTES} are read")
        digest = hashlib.sha256(data).digest()
        found = self._checked.get(digest)
        if found is not None and time.time() < found.until and found.source.current is found.keys:
            self._checked.move_to_end(digest)
            return found.identity
        self._checked.pop(digest, None)
        checked = await self._check(data)
        self._checked[digest] = checked
        if len(self._checked) > _MAX_CACHED:
            self._checked.popitem(last=False)
        return checked.identity

    async def _check(self, token: bytes) -> _Checked:
        try:
            unchecked = jwt.decode_complete(token, options={"verify_signature": False})
        except _DECODE_ERRORS as error:
            raise Unauthenticated("the token is malformed") from error
        name, header = unchecked["payload"].get("iss"), unchecked["header"]
        known = self._issuers.get(name) if isinstance(name, str) else None
        if known is None:
            raise Unauthenticated("the token is of an issuer that is not trusted here")
        issuer, source = known
        algorithm = header.get("alg")
        if algorithm not in issuer.algorithms:
            raise Unauthenticated(f"the token's algorithm is not one of {', '.join(issuer.algorithms)}")
        keys, key = await _key(source, header.get("kid"))
        if algorithm not in key.algorithms:
            raise Unauthenticated("the token's algorithm is not that of its key")
        try:
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=issuer.audiences,
                issuer=issuer.issuer,
                leeway=issuer.leeway_s,
                options={"require": _REQUIRED},
            )
            until = float(claims["exp"]) + issuer.leeway_s
        except _DECODE_ERRORS as error:
            raise Unauthenticated(_reason(error)) from error
        return _Checked(_identity(issuer, claims), until, source, keys)


async def _key(source: KeySource, kid: object) -> tuple[KeySet, VerificationKey]:
    if kid is not None and not isinstance(kid, str):
        raise Unauthenticated("the token's kid is not a text")
    keys = source.current
    found = None if keys is None else keys.find(kid)
    if found is None:
        keys = await source.renewed()
        found = None if keys is None else keys.find(kid)
    if keys is None:
        raise CredentialsUnavailable("the keys of the token's issuer could not be loaded yet; try again")
    if found is None:
        raise Unauthenticated("the token's key is not one of its issuer's")
    return keys, found


def _identity(issuer: Issuer, claims: Mapping[str, Any]) -> Identity:
    for path, wanted in issuer.required_claims.items():
        if not _has(claim(claims, path), wanted if isinstance(wanted, list) else [wanted]):
            raise Unauthenticated(f"the token's claim {path!r} is not what is required here")
    subject = claims["sub"]
    if not 0 < len(subject) <= _MAX_SUBJECT or not subject.isprintable():
        raise Unauthenticated(f"the token's sub is not a printable text of at most {_MAX_SUBJECT} characters")
    value = claim(claims, issuer.tenant_claim)
    if issuer.tenants is not None and isinstance(value, str):
        value = issuer.tenants.get(value)
    if not isinstance(value, str) or not is_tenant(issuer.tenant_prefix + value):
        raise Unauthenticated(f"the token's claim {issuer.tenant_claim!r} names no tenant")
    return Identity(issuer.tenant_prefix + value, f"{issuer.issuer} {subject}", _best_class(issuer, claims))


def _best_class(issuer: Issuer, claims: Mapping[str, Any]) -> int | None:
    if issuer.class_claim is None:
        return None
    value = claim(claims, issuer.class_claim)
    values = value if isinstance(value, list) else [value]
    granted = [issuer.classes[each] for each in values if isinstance(each, str) and each in issuer.classes]
    return min(granted, default=issuer.default_class)


def _has(value: object, wanted: Sequence[object]) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(type(each) is type(one) and each == one for each in values for one in wanted)


def _reason(error: Exception) -> str:
    """Return what a caller is told: a kind, and nothing that the token says."""
    if isinstance(error, jwt.ExpiredSignatureError):
        return "the token has expired"
    if isinstance(error, jwt.ImmatureSignatureError):
        return "the token is not valid yet"
    if isinstance(error, jwt.InvalidAudienceError):
        return "the token is for another audience"
    if isinstance(error, jwt.MissingRequiredClaimError):
        return f"the token lacks one of the claims {', '.join(_REQUIRED)}"
    if isinstance(error, jwt.InvalidSignatureError):
        return "the token's signature is wrong"
    return "the token is not valid"
