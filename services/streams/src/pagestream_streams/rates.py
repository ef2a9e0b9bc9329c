"""Limits of a tenant or a credential, and how far they are used."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple, Protocol

TENANT, CREDENTIAL = "tenant", "credential"


@dataclass(frozen=True)
class Limits:
    """Most that may be used. 0: no limit. The order of the fields is that of admit.lua."""

    requests_per_minute: int = 0
    """Requests accepted in any 60 s."""
    tokens_per_minute: int = 0
    """Tokens of prompts and outputs in any 60 s."""
    tokens_per_day: int = 0
    """Likewise in any 24 h."""
    concurrent_requests: int = 0
    """Requests that have been accepted and have not ended."""
    queued_tokens: int = 0
    """Prompt tokens of requests that no engine has claimed yet."""

    @property
    def values(self) -> tuple[int, ...]:
        """The fields in order."""
        return astuple(self)

    @property
    def is_any(self) -> bool:
        """Whether there is any limit."""
        return any(self.values)


NO_LIMITS = Limits()
NAMES = tuple(Limits.__dataclass_fields__)
"""Names of the limits, in order."""


class LimitSource(Protocol):
    """Where a gateway's limits come from. All gateways of a deployment should have the same."""

    def of(self, tenant: str, credential: str) -> tuple[Limits, Limits]:
        """Return the limits of a tenant, and those of one of its credentials."""


class Rate(NamedTuple):
    """How far a limit is used."""

    name: str
    """One of NAMES."""
    scope: str
    """TENANT or CREDENTIAL."""
    limit: int
    used: int
    """What counts now, a request that was just admitted included. Above the limit where outputs were longer than
    expected."""
    reset_s: float | None
    """Seconds until nothing counts any more; None where that depends on what runs."""

    @property
    def remaining(self) -> int:
        """What may still be used now."""
        return max(0, self.limit - self.used)
