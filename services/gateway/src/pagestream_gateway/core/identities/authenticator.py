"""Finds out who a caller is."""

from typing import Protocol

from pagestream_gateway.core.identities.api_keys import ApiKeys
from pagestream_gateway.core.identities.identity import DEFAULT_TENANT, Credentials, Identity
from pagestream_gateway.errors import Unauthenticated

_ANYBODY = Identity(DEFAULT_TENANT)


class TokenChecker(Protocol):
    """Checks JSON Web Tokens. Its module is imported where tokens are accepted: its libraries take 0.1 s."""

    async def identity(self, token: str) -> Identity:
        """Return whose token this is. Raises Unauthenticated, CredentialsUnavailable."""


class Authenticator:
    """Checks the credentials of calls."""

    def __init__(self, keys: ApiKeys | None = None, tokens: TokenChecker | None = None) -> None:
        """What is None is not accepted; where all are, every caller is the default tenant."""
        self._keys = keys
        self._tokens = tokens

    async def identify(self, credentials: Credentials) -> Identity:
        """Return who calls. Raises Unauthenticated, CredentialsUnavailable."""
        if self._keys is None and self._tokens is None:
            return _ANYBODY
        return await self._bearer(_bearer(credentials.authorization))

    async def _bearer(self, bearer: str) -> Identity:
        if self._tokens is not None and (self._keys is None or bearer.count(".") == 2):
            return await self._tokens.identity(bearer)
        if self._keys is None:
            raise Unauthenticated("API keys are not accepted here")
        return self._keys.identity(bearer)


def _bearer(authorization: str | None) -> str:
    if not authorization:
        raise Unauthenticated("a key or token is needed: send the header 'Authorization: Bearer <key>'")
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("the Authorization header must be 'Bearer <key>'")
    return key.strip()
