"""Real Redis servers for tests, each with its own folder."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pagestream_streams import EmbeddedRedis, ServerBinary
from pagestream_streams.connection import find_servers, free_port
from redis import Redis

_WRITTEN_LIMIT_S = 60.0
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


def server_of_seven() -> ServerBinary:
    """Return a server that knows clusters, Sentinels and TLS (a wheel's is built without some of them), or skip."""
    for server in find_servers():
        if server.version[0] >= 7 and "site-packages" not in server.path.parts:
            return server
    skip_for_want_of("redis7", "no redis-server or valkey-server from 7.0 on is on the PATH")
    raise AssertionError


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
    end = time.monotonic() + _WRITTEN_LIMIT_S
    with Redis.from_url(server.url) as client:
        while client.info("persistence")["aof_buffer_length"]:
            if time.monotonic() > end:
                pytest.fail(f"Redis has not written its file within {_WRITTEN_LIMIT_S:.0f} s")
            time.sleep(_PAUSE_S)
    server.kill()


def emptied(server: EmbeddedRedis) -> str:
    """Start the server if needed, delete all keys, and return its URL."""
    if server.pid is None:
        asyncio.run(server.start())
    with Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 0)
        client.flushall()
        client.script_flush()
    return server.url
