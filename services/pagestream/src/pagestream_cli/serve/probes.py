"""Asks a part whether it is ready, in a few bytes and without a client library: serve has to stay small."""

from __future__ import annotations

import asyncio

from pagestream_cli.servefile import dial_host

LIMIT_S = 2.0
"""For one question."""


async def http_ok(host: str, port: int, path: str) -> bool:
    """Whether `GET path` is answered with 200."""
    request = f"GET {path} HTTP/1.1\r\nHost: {dial_host(host)}:{port}\r\nConnection: close\r\n\r\n"
    return b" 200 " in await _ask(dial_host(host).strip("[]"), port, request.encode())


async def redis_pong(port: int) -> bool:
    """Whether a Redis on this machine answers PING, and so has loaded its files."""
    return await _ask("127.0.0.1", port, b"PING\r\n") == b"+PONG\r\n"


async def _ask(host: str, port: int, request: bytes) -> bytes:
    """First line of the answer; empty when there is none."""
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request)
                return await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return b""
