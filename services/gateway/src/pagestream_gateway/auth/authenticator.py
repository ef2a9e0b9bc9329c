"""Authenticate a caller against the credentials that the settings name, and load those credentials.

API keys stand in a file: their digests, and the tenants that they stand for.
"""

import hashlib
import hmac
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from pagestream_streams.tasks import Periodic

from pagestream_gateway.auth.identity import (
    DEFAULT_TENANT,
    TENANT_FORM,
    Administrator,
    Credentials,
    Identity,
    is_tenant,
)
from pagestream_gateway.errors import SettingsError, Unauthenticated, WrongCredential
from pagestream_gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)
_RELOAD_PERIOD_S = 5.0  # one small file; a revoked key is refused within this time

_HASH = re.compile(r"[0-9a-f]{64}")
_NAME_DIGITS = 12  # of a key's SHA-256, in its name: enough to find its line in the file


class ApiKeys:
    """Maps API keys to identities by the keys' SHA-256. Keys themselves are never held."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """`tenants`: lower-case hexadecimal SHA-256 -> tenant."""
        self._identities = _by_digest(tenants)

    def replace(self, tenants: Mapping[str, str]) -> None:
        """Accept these keys from now on, and no others."""
        self._identities = _by_digest(tenants)

    def identity(self, key: str) -> Identity:
        """Return whose key this is. Raises Unauthenticated."""
        found = self.find(key)
        if found is None:
            raise Unauthenticated("the API key is not known")
        return found

    def find(self, key: str) -> Identity | None:
        """Return whose key this is, None for an unknown one."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found: Identity | None = None
        for known, identity in self._identities.items():  # every key, whichever matches: the time reveals nothing
            if hmac.compare_digest(known, digest):
                found = identity
        return found


class KeyFile:
    """The file of API keys, read again when it changes: keys are made and revoked while gateways run."""

    def __init__(self, path: Path, option: str = "--api-keys") -> None:
        """Read it; errors name `option`. Raises SettingsError as `read_key_file`, and where it holds no key."""
        self._path, self._option = path, option
        self._text = _text_of(path, option)
        tenants = read_key_file(path, self._text, option)
        if not tenants:
            raise SettingsError(f"{option}: {path} holds no key; leave the option out to serve without keys")
        self.keys = ApiKeys(tenants)

    def refresh(self) -> bool:
        """Read the file; return whether it has changed. One that is wrong is logged and ignored until it changes; one
        without a key refuses every caller.
        """
        try:
            text = _text_of(self._path, self._option)
            if text == self._text:
                return False
            self._text = text
            tenants = read_key_file(self._path, text, self._option)
        except SettingsError as error:
            logger.warning("the keys stay as they were: %s", error)
            return False
        self.keys.replace(tenants)
        logger.info("loaded %d keys from %s", len(tenants), self._path)
        return True

    def watch(self) -> Periodic:
        """Return a task that calls `refresh` periodically, once it is started."""

        async def work() -> None:
            self.refresh()

        return Periodic(self._option, _RELOAD_PERIOD_S, work)


def _by_digest(tenants: Mapping[str, str]) -> dict[bytes, Identity]:
    return {bytes.fromhex(digest): Identity(name, digest[:_NAME_DIGITS]) for digest, name in tenants.items()}


def _text_of(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{option}: cannot read {path}: {error}") from error


def read_key_file(path: Path, text: str | None = None, option: str = "--api-keys") -> dict[str, str]:
    """Read lines of `<sha256> -> <tenant>` (the arrow may be a blank, '#' starts a comment) or a JSON object
    {"<sha256>": "<tenant>"}. Returns hexadecimal SHA-256 -> tenant.

    `text`: what was read of the file. Raises SettingsError with the line or key that is wrong.
    """
    if text is None:
        text = _text_of(path, option)
    try:
        return _tenants(_json_pairs(path, text) if text.lstrip().startswith("{") else _line_pairs(path, text))
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from error


def _tenants(pairs: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    tenants: dict[str, str] = {}
    for place, digest, tenant in pairs:
        bare = digest.lower().removeprefix("sha256:")
        if not _HASH.fullmatch(bare):
            raise ValueError(f"{place}: expected the 64 hexadecimal digits of a key's SHA-256 (never the key itself)")
        if not is_tenant(tenant):
            raise ValueError(f"{place}: {tenant!r} is not a tenant name ({TENANT_FORM})")
        if tenants.setdefault(bare, tenant) != tenant:
            raise ValueError(f"{place}: the same key belongs to two tenants")
    return tenants


def _line_pairs(path: Path, text: str) -> list[tuple[str, str, str]]:
    pairs = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace("->", " ").split()
        if not words:
            continue
        if len(words) != 2:
            raise ValueError(f"{path}:{number}: expected '<sha256> -> <tenant>'")
        pairs.append((f"{path}:{number}", words[0], words[1]))
    return pairs


def _json_pairs(path: Path, text: str) -> list[tuple[str, str, str]]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict) or not all(isinstance(value, str) for value in document.values()):
        raise ValueError(f'{path} must be an object of "<sha256>": "<tenant>"')
    return [(f"{path}: entry {number}", key, value) for number, (key, value) in enumerate(document.items(), start=1)]


_ANYBODY = Identity(DEFAULT_TENANT)


class TokenChecker(Protocol):
    """Checks JSON Web Tokens. Its module is imported where they are accepted: its libraries take 0.1 s."""

    async def identity(self, token: str) -> Identity:
        """Return whose token this is. Raises Unauthenticated, CredentialsUnavailable."""


class CertificateChecker(Protocol):
    """Maps client certificates to tenants; imported likewise."""

    def identity(self, pem: str) -> Identity:
        """Return whose certificate this is. Raises Unauthenticated."""


class Authenticator:
    """Checks the credentials of calls. A key or a token goes before a certificate: who has one acts for its owner."""

    def __init__(
        self,
        keys: ApiKeys | None = None,
        tokens: TokenChecker | None = None,
        certificates: CertificateChecker | None = None,
        administrators: ApiKeys | None = None,
    ) -> None:
        """What is None is not accepted; where the first three are, every caller is the default tenant."""
        self._keys = keys
        self._tokens = tokens
        self._certificates = certificates
        self._administrators = administrators
        self.accepts_anybody = all(each is None for each in (keys, tokens, certificates, administrators))
        """Whether no credential is accepted: every caller is the default tenant, whatever it sends."""

    async def identify(self, credentials: Credentials) -> Identity:
        """Return who calls. Raises Unauthenticated, CredentialsUnavailable, WrongCredential for an administrator."""
        if self.find_administrator(credentials) is not None:
            raise WrongCredential("an administrator's key opens /admin/v1 alone; use a tenant's key here")
        takes_bearers = self._keys is not None or self._tokens is not None
        if credentials.authorization and takes_bearers:
            return await self._of_bearer(bearer_of(credentials.authorization))
        if self._certificates is not None and credentials.certificate is not None:
            return self._certificates.identity(credentials.certificate)
        if takes_bearers:
            raise Unauthenticated("a key or token is needed: send the header 'Authorization: Bearer <key>'")
        if self._certificates is not None:
            raise Unauthenticated("a client certificate is needed, over TLS")
        return _ANYBODY

    def find_administrator(self, credentials: Credentials) -> Administrator | None:
        """Return which administrator calls, None where none does."""
        scheme, _, key = (credentials.authorization or "").partition(" ")
        if self._administrators is None or scheme.lower() != "bearer":
            return None
        found = self._administrators.find(key.strip())
        return None if found is None else Administrator(found.tenant, found.key, credentials.peer)

    async def administrator(self, credentials: Credentials) -> Administrator:
        """Return which administrator calls. Raises Unauthenticated, and WrongCredential for a tenant."""
        found = self.find_administrator(credentials)
        if found is not None:
            return found
        if not credentials.authorization and credentials.certificate is None:
            raise Unauthenticated("an administrator's key is needed: send the header 'Authorization: Bearer <key>'")
        if await self.identify(credentials) == _ANYBODY:
            raise Unauthenticated("the administrator's key is not known")
        raise WrongCredential("this is for administrators; a tenant's credential does not open it")

    async def _of_bearer(self, bearer: str) -> Identity:
        if self._tokens is not None and (self._keys is None or bearer.count(".") == 2):
            return await self._tokens.identity(bearer)
        if self._keys is None:
            raise Unauthenticated("API keys are not accepted here")
        return self._keys.identity(bearer)


def bearer_of(authorization: str) -> str:
    """Return what an Authorization header carries. Raises Unauthenticated for another form."""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("the Authorization header must be 'Bearer <key>'")
    return key.strip()


class Reload(NamedTuple):
    """Something that is read again when it changes."""

    name: str
    """The setting that names it."""
    run: Callable[[], Awaitable[bool]]
    """Reads it now; returns whether it has changed. What is wrong with it is logged."""


class Refreshable(Protocol):
    """A file that is read again when it changes."""

    def refresh(self) -> bool:
        """Read the file; return whether it has changed."""

    def watch(self) -> Periodic:
        """Return a task that calls `refresh` periodically, once it is started."""


class Identities:
    """The checks of a process' callers, and the tasks that keep them up to date once they are started."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Read the files that the settings name. Raises SettingsError for one that is wrong."""
        self.watches: list[Periodic] = []
        self.reloads: list[Reload] = []
        keys = None if settings.api_keys is None else KeyFile(settings.api_keys)
        administrators = None if settings.admin_keys is None else KeyFile(settings.admin_keys, "--admin-keys")
        for name, file in (("api_keys", keys), ("admin_keys", administrators)):
            if file is not None:
                self._watch(name, file)
        self.authenticator = Authenticator(
            None if keys is None else keys.keys,
            self._tokens(settings),
            self._certificates(settings),
            None if administrators is None else administrators.keys,
        )

    def _tokens(self, settings: GatewaySettings) -> TokenChecker | None:
        if settings.jwt_issuers is None:
            return None
        from pagestream_gateway.auth.tokens import Tokens, read_issuers

        tokens = Tokens(read_issuers(settings.jwt_issuers))
        self.watches += tokens.watches()
        self.reloads.append(Reload("jwt_issuers", tokens.reload))
        return tokens

    def _certificates(self, settings: GatewaySettings) -> CertificateChecker | None:
        if settings.tls_client_tenants is None:
            return None
        from pagestream_gateway.auth.certificates import CertificateRules

        rules = CertificateRules(settings.tls_client_tenants)
        self._watch("tls_client_tenants", rules)
        return rules

    def _watch(self, name: str, file: Refreshable) -> None:
        async def run() -> bool:
            return file.refresh()

        self.watches.append(file.watch())
        self.reloads.append(Reload(name, run))
