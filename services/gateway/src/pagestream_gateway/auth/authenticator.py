"""Authenticate a caller against the credentials that the settings name, and load those credentials."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from pagestream_streams.tasks import Periodic

from pagestream_gateway.auth.api_keys import ApiKeys, KeyFile
from pagestream_gateway.auth.identity import DEFAULT_TENANT, Administrator, Credentials, Identity
from pagestream_gateway.errors import Unauthenticated, WrongCredential
from pagestream_gateway.settings import GatewaySettings

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
