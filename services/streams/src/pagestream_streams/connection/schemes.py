"""The forms of Redis addresses, for settings that are checked before redis-py is imported."""

import re
from typing import NamedTuple

SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)
"""Schemes of addresses; "rediss" is TLS."""


class AddressParts(NamedTuple):
    """A Redis address in its parts."""

    scheme: str
    login: str
    """What stands before the last `@` of the hosts."""
    hosts: tuple[str, ...]
    """Each `host[:port]`, an IPv6 address in brackets."""
    path: str
    query: str


def split_url(url: str) -> AddressParts:
    """Split a Redis address, which may name several hosts. `urlsplit` of some Pythons refuses such with IPv6 addresses:
    it takes all hosts for one.
    """
    scheme, _, rest = url.partition("://")
    [authority] = re.findall(r"\A[^/?#]*", rest)
    path, _, query = rest[len(authority) :].partition("#")[0].partition("?")
    login, _, hosts = authority.rpartition("@")
    return AddressParts(scheme, login, tuple(hosts.split(",")), path, query)
