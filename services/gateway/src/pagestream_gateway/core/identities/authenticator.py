"""Finds out who a caller is."""

from pagestream_gateway.core.identities.api_keys import ApiKeys
from pagestream_gateway.core.identities.identity import DEFAULT_TENANT, Credentials, Identity
from pagestream_gateway.errors import Unauthenticated

_ANYBODY = Identity(DEFAULT_TENANT)


class Authenticator:
    """Checks the credentials of calls."""

    def __init__(self, keys: ApiKeys | None) -> None:
        """`keys`: None where no credential is asked for, and every caller is the default tenant."""
        self._keys = keys

    async def identify(self, credentials: Credentials) -> Identity:
        """Return who calls. Raises Unauthenticated."""
        if self._keys is None:
            return _ANYBODY
        return self._keys.identity(_bearer(credentials.authorization))


def _bearer(authorization: str | None) -> str:
    if not authorization:
        raise Unauthenticated("an API key is needed: send the header 'Authorization: Bearer <key>'")
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("the Authorization header must be 'Bearer <key>'")
    return key.strip()
