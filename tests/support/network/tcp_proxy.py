"""A TCP proxy that can be cut: it then forwards nothing and closes nothing.

What is sent meanwhile is late, not lost, as after a cable was pulled and put back: TCP sends it again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

CHUNK_BYTES = 1 << 16


class TcpProxy:
    """Listens on a free port of the loopback interface: an async context manager."""

    def __init__(self, upstream_port: int) -> None:
        self.port = 0
        self._upstream_port = upstream_port
        self._carries = asyncio.Event()
        self._carries.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            await self._carries.wait()
            try:
                there, back = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            except OSError:
                return
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, back))
                    group.create_task(self._pump(there, writer))
            finally:
                back.close()
        except asyncio.CancelledError:
            pass  # the proxy is closing
        finally:
            writer.close()
            if task is not None:
                self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                await self._carries.wait()
                writer.write(data)
                await writer.drain()
        await self._carries.wait()
        writer.close()  # which ends the other direction, too
