"""Request ids: "<model tag>-<partition, 4 hex digits>-<96 random bits, 24 hex digits><tenant tag, 8 hex digits>".

An id alone names its keys, and shows whether a tenant owns it when Redis has lost the request.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NamedTuple

_FORM = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-([0-9a-f]{32})", re.ASCII)

_RANDOM_DIGITS = 24

DEFAULT_PARTITIONS = 4
"""Partitions of a new model unless it is published with another number; the autoscaling study uses the same."""
MAX_PARTITIONS = 1024
"""Most partitions of a model; ids can name more, which a model of an earlier version may have."""


class RequestId(NamedTuple):
    """A request id in its parts."""

    model_tag: str
    partition: int
    unique: str

    def is_of(self, tenant: str) -> bool:
        """Return whether it was created for the tenant; of other tenants' ids one in 2**32 passes."""
        return self.unique[_RANDOM_DIGITS:] == _tenant_tag(self.unique[:_RANDOM_DIGITS], tenant)

    def __str__(self) -> str:
        """Format the id as clients see it."""
        return f"{self.model_tag}-{self.partition:04x}-{self.unique}"


def model_tag(model: str) -> str:
    """Return the first 8 hexadecimal digits of the SHA-256 of a model's name."""
    return hashlib.sha256(model.encode()).hexdigest()[:8]


def new_request_id(model: str, partition: int, tenant: str) -> str:
    """Create an id for a tenant. Its random part keeps ids from being guessed."""
    random = secrets.token_hex(_RANDOM_DIGITS // 2)
    return str(RequestId(model_tag(model), partition, random + _tenant_tag(random, tenant)))


def parse_request_id(text: str) -> RequestId | None:
    """Return the parts of an id; None for a malformed one."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    tag, partition, unique = match.groups()
    return RequestId(tag, int(partition, 16), unique)


def _tenant_tag(random: str, tenant: str) -> str:
    # With the random digits, so that ids don't show which of them are one tenant's.
    return hashlib.sha256(f"{random}:{tenant}".encode()).hexdigest()[:8]
