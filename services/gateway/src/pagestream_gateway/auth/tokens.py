"""JSON Web Tokens as credentials: trusted issuers, their keys (RFC 7517), and the identity that claims make.

Signature, times and audience are checked. Keys come from a file, or from an address that is fetched again at intervals.
"""

import asyncio
import hashlib
import ipaddress
import json
import logging
import ssl
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

import httpx2
import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from pagestream_streams.tasks import Periodic, wait_for_event
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pagestream_gateway.auth.identity import TENANT_FORM, Identity, is_tenant
from pagestream_gateway.errors import CredentialsUnavailable, SettingsError, Unauthenticated
from pagestream_gateway.settings import PRIORITIES

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


_MAX_FILE_BYTES = 1024 * 1024
_LAST_CLASS = PRIORITIES[-1]

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Asymmetric ones alone: with a symmetric one who can check a token can make it."""
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Scalar = bool | int | float | Text


class Issuer(BaseModel):
    """One issuer. Claims are named by their paths: "tenant", "realm.roles"; a claim's own name may have dots."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    issuer: Text
    """What `iss` has to be, exactly."""
    audiences: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """`aud` has to name one of these."""
    jwks_url: Text | None = None
    """Where its public keys are: https, or http on this machine."""
    jwks_ca: Text | None = None
    """PEM file of the authorities that may vouch for that address; None: those of the system."""
    jwks_file: Text | None = None
    """Or a file that holds them, read again when it changes."""
    algorithms: Annotated[list[Algorithm], Field(min_length=1)] = ["RS256", "PS256", "ES256", "EdDSA"]
    tenant_claim: Text
    """The claim that names the tenant; a text."""
    tenants: Annotated[dict[str, str], Field(max_length=100_000)] | None = None
    """What that claim's values stand for; tokens with another value are refused. None: the value is the tenant."""
    tenant_prefix: Annotated[str, Field(max_length=64)] = ""
    """Before each tenant's name, so that two issuers can't name one tenant."""
    class_claim: Text | None = None
    """The claim that gives the best priority class: a text or a list of such. None: tokens set no bound."""
    classes: dict[str, int] = Field(default_factory=dict)
    """What that claim's values stand for; the best of a list counts."""
    default_class: int = _LAST_CLASS
    """The class of a token without such a value."""
    required_claims: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    """Claims that a token must have: the value, or one of several; of a claim that is a list one item has to be so."""
    leeway_s: Annotated[float, Field(ge=0, le=300)] = 30.0
    """Seconds by which the issuer's clock may differ from this machine's."""

    @model_validator(mode="after")
    def _check(self) -> "Issuer":
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise ValueError("give either jwks_url or jwks_file")
        if self.jwks_url is not None and not _is_safe(self.jwks_url):
            raise ValueError("jwks_url must be https://..., or http:// on a loopback address, without a password")
        if self.jwks_ca is not None and self.jwks_url is None:
            raise ValueError("jwks_ca goes with jwks_url")
        for tenant in (self.tenants or {}).values():
            if not is_tenant(self.tenant_prefix + tenant):
                raise ValueError(f"tenants: {tenant!r} is not a tenant name ({TENANT_FORM})")
        if self.tenant_prefix and not is_tenant(self.tenant_prefix):
            raise ValueError(f"tenant_prefix: {self.tenant_prefix!r} can't begin a tenant name ({TENANT_FORM})")
        for number in (self.default_class, *self.classes.values()):
            if number not in PRIORITIES:
                raise ValueError(f"classes: one of {', '.join(map(str, PRIORITIES))} is expected, got {number}")
        if self.classes and self.class_claim is None:
            raise ValueError("classes goes with class_claim")
        return self


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    issuers: Annotated[list[Issuer], Field(min_length=1, max_length=64)]


def read_issuers(path: Path) -> Sequence[Issuer]:
    """Read {"issuers": [...]} from a JSON file. Raises SettingsError with the field that is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"--jwt-issuers: cannot read {path}: {error}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise SettingsError(f"--jwt-issuers: {path} has {len(data)} bytes, at most {_MAX_FILE_BYTES} are read")
    try:
        issuers = _Document.model_validate_json(data).issuers
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise SettingsError(f"--jwt-issuers: {path}: {place}: {first['msg']}") from error
    names = [each.issuer for each in issuers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingsError(f"--jwt-issuers: {path}: the issuer {twice!r} is there twice")
    return issuers


def claim(claims: Mapping[str, Any], path: str) -> Any:
    """Return the claim at a path, None where there is none. A name that has dots itself goes before a nested one."""
    if path in claims:
        return claims[path]
    for end in range(len(path) - 1, 0, -1):
        inner = claims.get(path[:end]) if path[end] == "." else None
        if isinstance(inner, Mapping) and (found := claim(inner, path[end + 1 :])) is not None:
            return found
    return None


def _is_safe(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        has_password = parts.username is not None or parts.password is not None
    except ValueError:
        return False
    if has_password or parts.scheme not in ("http", "https"):
        return False  # the address is logged
    if parts.scheme == "https":
        return bool(host)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_FILE_PERIOD_S = 5.0
_URL_PERIOD_S = 300.0
"""Between two fetches. Issuers keep a key in the set for hours after they have ceased to use it."""
_FETCH_LIMIT_S = 10.0
_REFETCH_S = 30.0
"""Between two fetches for a key that is not in the set: anybody can send tokens that name one."""
_RETRY_S = 5.0
"""Between two fetches while there has been no set at all."""
_WAIT_S = 5.0
"""That a call waits for such a fetch."""


class KeySource(Protocol):
    """An issuer's keys, kept up to date while `watch`'s task runs."""

    @property
    def current(self) -> KeySet | None:
        """The keys; None while there have been none since the start."""

    async def renewed(self) -> KeySet | None:
        """Return the keys after a try to renew them, for a token whose key is not there."""

    async def reload(self) -> None:
        """Read or fetch the keys now. A failure is logged, and leaves them."""

    def watch(self) -> Periodic:
        """Return the task that keeps them up to date, once it is started."""


class FileSource:
    """Keys in a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises SettingsError where that fails."""
        self._path = path
        try:
            self._set = parse_key_set(_read(path))
        except (OSError, KeySetError) as error:
            raise SettingsError(f"--jwt-issuers: jwks_file {path}: {error}") from error

    @property
    def current(self) -> KeySet:
        """The keys."""
        return self._set

    async def renewed(self) -> KeySet:
        """Return the keys; the file is read periodically alone."""
        return self._set

    async def reload(self) -> None:
        """Read the file now."""
        self.refresh()

    def refresh(self) -> bool:
        """Read the file; return whether it has changed. A file that can't be used is logged, and leaves the keys."""
        try:
            data = _read(self._path)
            if hashlib.sha256(data).digest() == self._set.digest:
                return False
            self._set = parse_key_set(data)
        except (OSError, KeySetError) as error:
            logger.warning("the keys of %s stay as they were: %s", self._path, error)
            return False
        logger.info("loaded %d keys from %s", len(self._set.keys), self._path)
        return True

    def watch(self) -> Periodic:
        """Return a task that calls `refresh` periodically, once it is started."""

        async def work() -> None:
            self.refresh()

        return Periodic("JWKS file", _FILE_PERIOD_S, work)


class UrlSource:
    """Keys at an address. They are kept while it can't be reached, or answers with something else."""

    def __init__(self, url: str, ca: Path | None = None) -> None:
        """`ca`: PEM file of the authorities for it. Raises SettingsError where that can't be read."""
        self._url = url
        self._is_local = urlsplit(url).scheme == "http"
        self._ca = ca
        self._context()
        self._set: KeySet | None = None
        self._fetched = asyncio.Event()
        self._asked_at = -_REFETCH_S
        self._task = Periodic("JWKS", _URL_PERIOD_S, self.reload)

    @property
    def current(self) -> KeySet | None:
        """The keys; None while none have been fetched."""
        return self._set

    async def renewed(self) -> KeySet | None:
        """Return the keys after a fetch, or as they are where the last one for an unknown key was short ago."""
        if time.monotonic() - self._asked_at >= (_RETRY_S if self._set is None else _REFETCH_S):
            self._asked_at = time.monotonic()
            self._fetched = asyncio.Event()
            self._task.nudge()
        await wait_for_event(self._fetched, _WAIT_S)  # calls that come meanwhile wait for the same fetch
        return self._set

    async def reload(self) -> None:
        """Fetch the keys once. A failure is logged."""
        fetched = self._fetched
        try:
            data = await self._read()
            if self._set is None or hashlib.sha256(data).digest() != self._set.digest:
                found = await asyncio.to_thread(parse_key_set, data)
                if self._set is None:
                    self._asked_at = -_REFETCH_S  # calls asked for the first set, not for a new key
                self._set = found
                logger.info("loaded %d keys from %s", len(self._set.keys), self._url)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, TimeoutError, KeySetError, SettingsError) as error:
            logger.warning("cannot load keys from %s: %s: %s", self._url, type(error).__name__, error)
        finally:
            fetched.set()

    def watch(self) -> Periodic:
        """Return the task that fetches periodically, once it is started."""
        return self._task

    async def _read(self) -> bytes:
        context = await asyncio.to_thread(self._context)  # reads the system's authorities
        async with (
            asyncio.timeout(_FETCH_LIMIT_S),
            httpx2.AsyncClient(
                verify=context, timeout=_FETCH_LIMIT_S, follow_redirects=False, trust_env=not self._is_local
            ) as client,
            client.stream("GET", self._url, headers={"Accept-Encoding": "identity"}) as answer,
        ):
            if answer.status_code != httpx2.codes.OK:
                raise KeySetError(f"status {answer.status_code}")
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise KeySetError("the answer is compressed")
            data = bytearray()
            async for part in answer.aiter_raw():
                data += part
                if len(data) > MAX_SET_BYTES:
                    raise KeySetError(f"more than {MAX_SET_BYTES} bytes")
            return bytes(data)

    def _context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=None if self._ca is None else str(self._ca))
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"--jwt-issuers: jwks_ca {self._ca}: {error}") from error


def source_of(issuer: Issuer) -> KeySource:
    """Return where an issuer's keys come from. Raises SettingsError where its files can't be read."""
    if issuer.jwks_file is not None:
        return FileSource(Path(issuer.jwks_file))
    return UrlSource(issuer.jwks_url or "", None if issuer.jwks_ca is None else Path(issuer.jwks_ca))


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_SET_BYTES + 1)


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
