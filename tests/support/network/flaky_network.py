"""A TCP proxy for one port that resets connections, or drops bytes in one or both directions, when a test asks for it.

Unlike `tcp_proxy` it loses bytes, so that a client has to open a new connection afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Self

_CHUNK_BYTES = 1 << 16
_KEPT = 64  # chunks
_NO_LINGER = struct.pack("ii", 1, 0)  # a socket that is closed with it sends RST


class FlakyNetwork:
    """The proxy: an async context manager."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._to_callers: set[asyncio.StreamWriter] = set()
        self._pipes: set[asyncio.Task[None]] = set()
        self._refuses = False
        self._is_silent = False
        self._loses_answers = False
        self._stranded: set[asyncio.StreamWriter] = set()
        self.target = ""
        """Its address as "host:port"."""
        self.num_connections = 0
        """Connections that clients have opened so far, including those that were reset at once."""
        self.client_chunks: deque[bytes] = deque(maxlen=_KEPT)
        """The last chunks that clients sent; they were written to the server's sockets."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reset()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def lead_to(self, port: int) -> None:
        """Let new connections go to another server."""
        self._port = port

    def reset(self) -> None:
        """Reset all connections, and new ones until `repair`."""
        self._refuses = True
        for writer in self._writers:
            writer.transport.abort()

    def reset_callers(self) -> None:
        """Reset the clients' ends of all connections: the server gets what they sent, then the end. New ones work."""
        for writer in self._to_callers:
            if writer.is_closing():
                continue
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()

    def silence(self) -> None:
        """Drop every byte in both directions from now on without a reset, as a pulled cable does."""
        self._is_silent = True

    def strand(self) -> None:
        """Drop every byte of the open connections; new ones work, as after a router's restart."""
        self._stranded |= self._writers

    def lose_answers(self) -> None:
        """Drop what the server sends from now on; what clients send arrives."""
        self._loses_answers = True

    def repair(self) -> None:
        """Let new connections work again; reset the open ones, since they have lost bytes."""
        self.reset()
        self._refuses = self._is_silent = self._loses_answers = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self._refuses:
            writer.transport.abort()
            return
        try:
            answers, asks = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, asks}
        self._to_callers.add(writer)
        for source, sink, is_answer in ((reader, asks, False), (answers, writer, True)):
            task = asyncio.create_task(self._pipe(source, sink, is_answer))
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_answer: bool) -> None:
        with suppress(ConnectionError):
            while data := await source.read(_CHUNK_BYTES):
                if self._is_silent or sink in self._stranded or (is_answer and self._loses_answers):
                    continue
                sink.write(data)
                await sink.drain()
                if not is_answer:
                    self.client_chunks.append(data)
        sink.transport.abort()
        self._writers.discard(sink)
        self._to_callers.discard(sink)
