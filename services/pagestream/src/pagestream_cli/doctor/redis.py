"""Checks of a running Redis: whether it is durable, and can do what the settings require of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagestream_cli.datadir import DataDir, read_record
from pagestream_cli.doctor.finding import Finding, ok, problem, warning
from pagestream_cli.doctor.place import runs
from pagestream_cli.doctor.software import OLDEST_REDIS
from pagestream_cli.errors import ServeFileInvalidError

if TYPE_CHECKING:
    from pagestream_streams import StreamsSettings

WAITAOF_VERSION = (7, 2)
NEARLY_FULL = 0.9
MIB = 1 << 20


def check_running_redis(url: str | None, data_dir: DataDir) -> Iterator[Finding]:
    """Check the Redis at `url`, else that of the running serve, else nothing."""
    if url is None:
        url = _own_redis(data_dir)
    if url is None:
        return
    states: list[RedisState] = []
    for each in servers(url):
        state = _looked_at(each)
        if isinstance(state, Finding):
            yield state
        else:
            states.append(state)
    for state in states:
        yield check_version(state)
        yield check_role(state, url)
        yield check_persistence(state)
        yield check_memory(state)
    if states:
        yield from check_waits(states, os.environ)


def check_version(state: RedisState) -> Finding:
    """Check the server's version."""
    version = ".".join(map(str, state.version))
    if state.version < OLDEST_REDIS:
        return problem(
            f"redis {state.place}",
            f"{state.name} {version}",
            f"update it: {'.'.join(map(str, OLDEST_REDIS))} is the oldest that has the commands",
        )
    return ok(f"redis {state.place}", f"{state.name} {version}")


def check_role(state: RedisState, url: str) -> Finding:
    """Check that it accepts writes, and that its URL names what it is: single server or cluster."""
    subject = f"role {state.place}"
    is_named_as_cluster = url.partition("://")[0].endswith("+cluster")
    if state.in_cluster and not is_named_as_cluster:
        return problem(subject, "a node of a cluster", f"name it as one: redis+cluster://{state.place}")
    if is_named_as_cluster and not state.in_cluster:
        return problem(subject, "no node of a cluster", f"name it alone: redis://{state.place}")
    if state.is_master:
        return ok(subject, f"master with {state.replicas} replicas")
    if state.in_cluster:
        return ok(subject, "a replica of the cluster")
    return problem(
        subject,
        "a replica, which takes no writes",
        "name its master, or the Sentinels: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE",
    )


def check_persistence(state: RedisState) -> Finding:
    """Check what a restart of the server, and of its machine, would lose."""
    subject = f"persistence {state.place}"
    if not state.appendonly:
        return problem(
            subject,
            "appendonly no: a restart forgets requests and streams",
            "CONFIG SET appendonly yes, and the same in its configuration file",
        )
    if not state.last_write_ok:
        return problem(subject, "its last write to the append-only file failed", "check whether its disk is full")
    if not state.appendfsync:
        return warning(subject, "appendonly yes; appendfsync can't be read", "check that it is everysec or always")
    if state.appendfsync == "no":
        return warning(
            subject,
            "appendfsync no: the loss of its machine loses what the kernel has not written yet, about half a minute",
            "CONFIG SET appendfsync everysec, and the same in its configuration file",
        )
    if not state.syncs_in_rewrites:
        return warning(
            subject,
            f"appendfsync {state.appendfsync}, but no-appendfsync-on-rewrite yes: during a rewrite the loss of its "
            "machine loses what the kernel has not written yet, about half a minute",
            "CONFIG SET no-appendfsync-on-rewrite no, and the same in its configuration file",
        )
    loss = "nothing" if state.appendfsync == "always" else "up to a second"
    return ok(subject, f"appendonly yes, appendfsync {state.appendfsync}: the loss of its machine loses {loss}")


def check_memory(state: RedisState) -> Finding:
    """Check that it does not evict requests when it is full."""
    subject = f"memory {state.place}"
    limit = f"{state.used_bytes / MIB:.1f} of {state.max_bytes / MIB:.1f} MiB" if state.max_bytes else "no limit"
    found = f"{limit}, maxmemory-policy {state.policy}"
    remedy = "CONFIG SET maxmemory-policy noeviction, and the same in its configuration file"
    if state.policy != "noeviction":
        if state.max_bytes:
            return problem(subject, f"{found}: a full server drops requests", remedy)
        return warning(subject, f"{found}: a full server would drop requests if it had a limit", remedy)
    if state.max_bytes and state.used_bytes > NEARLY_FULL * state.max_bytes:
        return warning(
            subject,
            f"{found}: new requests fail soon",
            "raise maxmemory, or shorten the retention time of finished logs",
        )
    return ok(subject, found)


def check_waits(states: Sequence[RedisState], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the servers can do what PAGESTREAM_BROKER__WAIT_* requires of them."""
    from pagestream_streams import settings_from_environment

    try:
        settings = settings_from_environment(environ)
    except ValueError as error:
        yield problem("waits", str(error), "correct the variable")
        return
    if not settings.wait_fsync and not settings.wait_replicas:
        yield ok("waits", "none asked for (PAGESTREAM_BROKER__WAIT_FSYNC, __WAIT_REPLICAS)")
        return
    masters = [state for state in states if state.is_master]
    found = [finding for state in masters for finding in _waits_of(state, settings)]
    yield from found
    if not found:
        yield ok("waits", f"WAIT_FSYNC={settings.wait_fsync}, WAIT_REPLICAS={settings.wait_replicas}: can be met")


def _waits_of(state: RedisState, settings: StreamsSettings) -> Iterator[Finding]:
    subject = f"waits {state.place}"
    if state.replicas < settings.wait_replicas:
        yield problem(
            subject,
            f"WAIT_REPLICAS={settings.wait_replicas}, but {state.replicas} are connected: no request is accepted",
            "start replicas, or lower PAGESTREAM_BROKER__WAIT_REPLICAS",
        )
    if not settings.wait_fsync:
        return
    if state.version < WAITAOF_VERSION:
        yield problem(
            subject,
            f"WAIT_FSYNC needs WAITAOF, which {state.name} has from 7.2 on: no request is accepted",
            "update it, or unset PAGESTREAM_BROKER__WAIT_FSYNC and CONFIG SET appendfsync always",
        )
    elif not state.appendonly:
        yield problem(subject, "WAIT_FSYNC with appendonly no: no request is accepted", "CONFIG SET appendonly yes")
    elif state.appendfsync != "always":
        yield warning(
            subject,
            f"WAIT_FSYNC with appendfsync {state.appendfsync or 'unknown'}: servers are known to answer WAITAOF before "
            "their disk has the write",
            "CONFIG SET appendfsync always, and the same in its configuration file",
        )
    if settings.wait_fsync and settings.wait_replicas:
        yield warning(
            subject,
            "WAIT_FSYNC with WAIT_REPLICAS waits for replicas' disks, which they report once a second",
            "choose one of them, unless a second for each accepted request and each step is acceptable",
        )


def _looked_at(url: str) -> RedisState | Finding:
    from pagestream_streams import Unavailable

    subject = f"redis {shown(url)}"
    try:
        return asyncio.run(look(url))
    except ValueError as error:
        return problem(subject, str(error), "give redis://HOST:PORT/0")
    except Unavailable as error:
        return problem(subject, str(error), "start it, and check that it can be reached from this machine")


def _own_redis(data_dir: DataDir) -> str | None:
    try:
        record = read_record(data_dir.serve_file)
    except ServeFileInvalidError:
        return None
    return record.redis_url if record is not None and runs(record) else None


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
