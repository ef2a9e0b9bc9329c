"""A TCP proxy that can be cut: it then forwards nothing and closes nothing.

What is sent meanwhile is late, not lost, as after a cable was pulled and put back: TCP sends it again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from support.network.connection_server import ConnectionServer

CHUNK_BYTES = 1 << 16


class TcpProxy(ConnectionServer):
    """Listens on a free port of the loopback interface."""

    def __init__(self, upstream_port: int) -> None:
        super().__init__()
        self.port = 0
        self._upstream_port = upstream_port
        self._carries = asyncio.Event()
        self._carries.set()

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    @property
    def is_cut(self) -> bool:
        """Whether nothing is forwarded."""
        return not self._carries.is_set()

    def cut(self) -> None:
        """Forward nothing from now on, in either direction, not even the end of a connection."""
        self._carries.clear()

    def heal(self) -> None:
        """Forward what was held back, and what follows."""
        self._carries.set()

    def reset(self) -> None:
        """End every connection; new ones are accepted."""
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._carries.wait()
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, upstream))
                group.create_task(self._pump(upstream_reader, writer))
        finally:
            upstream.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                await self._carries.wait()
                writer.write(data)
                await writer.drain()
        await self._carries.wait()
        writer.close()  # which ends the other direction, too
