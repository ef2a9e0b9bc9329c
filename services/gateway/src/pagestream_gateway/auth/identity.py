"""Who a caller is, and what a call carries to show it."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

DEFAULT_TENANT = "default"
TENANT_FORM = "letters, digits, '.', '_', '@', '-', of ASCII; at most 128, the first a letter or digit"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")


@dataclass(frozen=True)
class Identity:
    """The caller of one call, as its credential names it."""

    tenant: str
    """Whose requests these are. Names are compared exactly: "A" and "a" are two tenants."""
    key: str = ""
    """Name of the credential, stable and no secret: the first 12 hexadecimal digits of an API key's SHA-256, a token's
    issuer and subject, or the certificate's name that named the tenant. Empty where no credential is asked for.
    """
    best_class: int | None = None
    """The best priority class that the credential allows; None where it sets no bound of its own."""
    peer: str = field(default="", compare=False)
    """Address that the call came from; a proxy's where there is one between."""


@dataclass(frozen=True)
class Administrator:
    """Who makes a call that concerns all tenants."""

    name: str
    key: str
    """As an Identity's."""
    peer: str = field(default="", compare=False)
    """Likewise."""


class Credentials(NamedTuple):
    """What a call carries to show who its caller is."""

    authorization: str | None = None
    """The Authorization header, or the metadata value of that name."""
    certificate: str | None = None
    """PEM of the client's certificate, which the handshake has checked; None where it was not asked for, or has none.
    """
    peer: str = ""
    """Address that the call came from."""


def is_tenant(name: str) -> bool:
    """Return whether `name` may be a tenant's: ASCII alone, so that no two names look alike and differ."""
    return _TENANT.fullmatch(name) is not None
