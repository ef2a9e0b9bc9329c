"""The state of a running Redis, as far as doctor checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SECTIONS = ("server", "persistence", "memory", "replication", "cluster")
LIMIT_S = 3.0


@dataclass(frozen=True)
class RedisState:
    """State of one server."""

    place: str
    """Host and port, or the path of its socket."""
    name: str
    """"redis" or "valkey"."""
    version: tuple[int, ...]
    is_master: bool
    in_cluster: bool
    replicas: int
    """Number of connected replicas."""
    appendonly: bool
    appendfsync: str
    """Empty where CONFIG is not permitted."""
    syncs_in_rewrites: bool
    """False with no-appendfsync-on-rewrite."""
    last_write_ok: bool
    """Whether its last write to the append-only file succeeded."""
    used_bytes: int
    max_bytes: int
    """0 without a limit."""
    policy: str
    """maxmemory-policy."""

    @classmethod
    def of(cls, place: str, info: Mapping[str, Any], settings: Mapping[str, str]) -> RedisState:
        """Build the state from INFO's fields and CONFIG's settings, as far as they are permitted."""
        is_valkey = "valkey_version" in info
        version = str(info["valkey_version" if is_valkey else "redis_version"])
        return cls(
            place=place,
            name="valkey" if is_valkey else "redis",
            version=tuple(int(part) for part in version.split(".") if part.isdecimal()),
            is_master=info["role"] == "master",
            in_cluster=bool(info.get("cluster_enabled", 0)),
            replicas=int(info.get("connected_slaves", 0)),
            appendonly=bool(info["aof_enabled"]),
            appendfsync=settings.get("appendfsync", ""),
            syncs_in_rewrites=settings.get("no-appendfsync-on-rewrite") != "yes",
            last_write_ok=info.get("aof_last_write_status", "ok") == "ok",
            used_bytes=int(info["used_memory"]),
            max_bytes=int(info.get("maxmemory", 0)),
            policy=str(info.get("maxmemory_policy", "noeviction")),
        )


def servers(url: str) -> list[str]:
    """Return the URL of each server that a URL names: those of a cluster, else the URL itself."""
    from pagestream_streams.settings import split_url

    parts = split_url(url)
    kind, _, cluster = parts.scheme.partition("+")
    if cluster != "cluster":
        return [url]
    login, query = parts.login and f"{parts.login}@", parts.query and f"?{parts.query}"
    return [f"{kind}://{login}{host}{query}" for host in parts.hosts]


def shown(url: str) -> str:
    """Return a URL's address without user and password."""
    from pagestream_streams.settings import split_url

    parts = split_url(url)
    return ",".join(parts.hosts) or parts.path


async def look(url: str) -> RedisState:
    """Query the server at a URL, or the master that Sentinels name.

    Raises:
        ValueError: the URL is malformed.
        Unavailable: it does not answer, or refuses.
    """
    from pagestream_streams import StreamsSettings
    from pagestream_streams.connection.connection import Connection
    from redis.exceptions import ResponseError

    connection = Connection(url, StreamsSettings(connect_timeout_s=LIMIT_S, command_timeout_s=LIMIT_S))
    try:
        await connection.open()
        info: dict[str, Any] = {}
        for section in SECTIONS:
            info |= await connection.execute("INFO", section)
        try:
            # A pattern: several names at once are known from 7.0 on.
            answer = [each.decode() for each in await connection.execute("CONFIG", "GET", "*appendfsync*")]
        except ResponseError:  # an ACL user may not
            answer = []
    finally:
        await connection.close()
    return RedisState.of(shown(url), info, dict(zip(answer[::2], answer[1::2], strict=True)))
