"""Real Redis servers for tests, each with its own folder."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from pagestream_streams import Broker, EmbeddedRedis, ServerBinary, Unavailable
from pagestream_streams.connection import find_servers, free_port
from redis import Redis
from support.processes.waiting import LIMIT_S

_PAUSE_S = 0.01


def skip_for_want_of(thing: str, why: str) -> None:
    """Skip the test; fail it where PAGESTREAM_REQUIRE names the thing."""
    if thing in os.environ.get("PAGESTREAM_REQUIRE", "").split(","):
        pytest.fail(f"{thing} is required here: {why}")
    pytest.skip(why)


def oldest_server() -> ServerBinary:
    return min(find_servers(), key=lambda server: server.version)


def newest_server() -> ServerBinary:
    """Return the newest server; skip the test where the machine has only one version."""
    newest = max(find_servers(), key=lambda server: server.version)
    if newest.version == oldest_server().version:
        skip_for_want_of("redis7", f"this machine has no second server version beside {newest.version}")
    return newest


def server_of_one_file() -> ServerBinary:
    """Return a server older than 7.0, whose append-only file is one file; skip the test where there is none: the wheel
    of 6.2 is made for Python up to 3.12.
    """
    oldest = oldest_server()
    if oldest.version >= (7,):
        skip_for_want_of("redis6", f"this machine has no server older than 7.0; its oldest is {oldest.path}")
    return oldest


def server_of_seven() -> ServerBinary:
    """Return the newest server from 7.0 on that knows clusters, Sentinels and TLS (a wheel's is built without some of
    them, and another one's may be), or skip.
    """
    without_tls: list[str] = []
    for server in find_servers():
        if server.version[0] >= 7 and "site-packages" not in server.path.parts:
            if _knows_tls(server.path):
                return server
            without_tls.append(str(server.path))
    why = f": {', '.join(without_tls)} is built without TLS" if without_tls else ""
    skip_for_want_of("redis7", f"no redis-server or valkey-server from 7.0 on with TLS is on the PATH{why}")
    raise AssertionError


@cache
def _knows_tls(path: Path) -> bool:
    """Whether the server reads past a directive about TLS. It starts in neither case."""
    configuration = "tls-auth-clients no\nno-such-directive yes\n"
    answer = subprocess.run(
        [path, "-"], input=configuration, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return "no-such-directive" in answer.stdout + answer.stderr


@contextmanager
def running_server(folder: Path, binary: ServerBinary | None = None) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(folder, port=free_port(), binary=binary)
    asyncio.run(server.start())
    try:
        yield server
    finally:
        asyncio.run(server.stop())


def kill_written(server: EmbeddedRedis) -> None:
    """Kill a server whose acknowledged writes are all in its file.

    Under `appendfsync everysec` a write waits in memory for up to 2 s while a sync is under way, and is acknowledged.
    """
    wait_written(server.url)
    server.kill()


def wait_written(url: str) -> None:
    """Wait until a server's acknowledged writes are all in its file."""
    end = time.monotonic() + LIMIT_S
    with Redis.from_url(url) as client:
        while client.info("persistence")["aof_buffer_length"]:
            if time.monotonic() > end:
                pytest.fail(f"Redis has not written its file within {LIMIT_S:.0f} s")
            time.sleep(_PAUSE_S)


@dataclass(frozen=True)
class DiskState:
    """The growing append-only file, and how many of its bytes the disk has."""

    file: Path
    size: int


async def disk_state(server: EmbeddedRedis, broker: Broker) -> DiskState:
    """Wait until all acknowledged writes are in the file, and return its state."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with suppress(Unavailable):  # a connection was closed
                info = await broker.connection.execute("INFO", "persistence")
                rewrites = int(info["aof_rewrite_in_progress"]) or int(info["aof_rewrite_scheduled"])
                if not int(info["aof_buffer_length"]) and not rewrites:
                    break
            await asyncio.sleep(_PAUSE_S)
    file = growing_file(server.data_dir)
    return DiskState(file, file.stat().st_size)


def growing_file(data_dir: Path) -> Path:
    """Return the growing file: the last increment in Redis 7's folder, the only file of Redis 6."""
    increments = sorted(data_dir.glob("appendonlydir/*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
    return increments[-1] if increments else data_dir / "appendonly.aof"


async def die_behind(server: EmbeddedRedis, state: DiskState) -> None:
    """Lose everything after `state`, as on a machine whose disk was behind, and restart."""
    server.kill()
    with state.file.open("rb+") as file:
        file.truncate(state.size)
    await server.start()


def emptied(server: EmbeddedRedis) -> str:
    """Start the server if needed, delete all keys, and return its URL."""
    if server.pid is None:
        asyncio.run(server.start())
    with Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 0)
        client.flushall()
        client.script_flush()
    return server.url
