"""Request ids: "<model tag>-<partition, 4 hex digits>-<128 random bits, 32 hex digits>", so that an id alone finds its
keys.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NamedTuple

_FORM = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-([0-9a-f]{32})", re.ASCII)

MAX_PARTITIONS = 0x10000


class RequestId(NamedTuple):
    """A request id in its parts."""

    model_tag: str
    partition: int
    unique: str

    def __str__(self) -> str:
        """The id as clients see it."""
        return f"{self.model_tag}-{self.partition:04x}-{self.unique}"


def model_tag(model: str) -> str:
    """The first 8 hexadecimal digits of the SHA-256 of a model's name."""
    return hashlib.sha256(model.encode()).hexdigest()[:8]


def new(model: str, partition: int) -> str:
    """A fresh id. The random part is what keeps ids from being guessed."""
    return str(RequestId(model_tag(model), partition, secrets.token_hex(16)))


def parse(text: str) -> RequestId | None:
    """The parts of an id, or None where the text isn't one."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    tag, partition, unique = match.groups()
    return RequestId(tag, int(partition, 16), unique)
