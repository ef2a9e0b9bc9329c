"""A TCP proxy for one port of this machine, which a test cuts, resets, or has drop bytes."""

from __future__ import annotations

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import Self

_CHUNK_BYTES = 1 << 16
_KEPT = 64  # chunks
_NO_LINGER = struct.pack("ii", 1, 0)  # a socket that is closed with it sends RST


class ConnectionServer(ABC):
    """Handles each connection in a task, and cancels the tasks when it is closed: an async context manager."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @abstractmethod
    async def _listen(self) -> asyncio.Server:
        """Start a server that calls `_accept`."""

    @abstractmethod
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection until its end."""

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the peer was killed, or this server is closing
        finally:
            writer.close()


class Proxy(ConnectionServer):
    """Listens on a free port of the loopback interface.

    What is sent while it is cut is late, not lost, as after a cable was pulled and put back: TCP sends it again. Bytes
    that it drops are lost, so that a client has to open a new connection afterwards.
    """

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = 0
        self.num_connections = 0
        """Connections that clients have opened so far, including those that were reset at once."""
        self.client_chunks: deque[bytes] = deque(maxlen=_KEPT)
        """The last chunks that clients sent; they were written to the server's sockets."""
        self._upstream_port = port
        self._carries = asyncio.Event()
        self._carries.set()
        self._to_clients: set[asyncio.StreamWriter] = set()
        self._to_server: set[asyncio.StreamWriter] = set()
        self._stranded: set[asyncio.StreamWriter] = set()
        self._refuses = self._is_silent = self._loses_answers = False

    @property
    def target(self) -> str:
        """Its address as "host:port"."""
        return f"127.0.0.1:{self.port}"

    def lead_to(self, port: int) -> None:
        """Let new connections go to another server."""
        self._upstream_port = port

    # -- what is late --

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

    # -- what is lost --

    def reset(self) -> None:
        """Reset all connections, and new ones until `repair`."""
        self._refuses = True
        for writer in self._to_clients | self._to_server:
            writer.transport.abort()

    def reset_clients(self) -> None:
        """Reset the clients' ends of all connections: the server gets what they sent, then the end. New ones work."""
        for writer in self._to_clients:
            if not writer.is_closing():
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                writer.transport.abort()

    def silence(self) -> None:
        """Drop every byte in both directions from now on without a reset, as a pulled cable does."""
        self._is_silent = True

    def strand(self) -> None:
        """Drop every byte of the open connections; new ones work, as after a router's restart."""
        self._stranded |= self._to_clients | self._to_server

    def lose_answers(self) -> None:
        """Drop what the server sends from now on; what clients send arrives."""
        self._loses_answers = True

    def repair(self) -> None:
        """Let new connections work again; reset the open ones, since they have lost bytes."""
        self.reset()
        self._refuses = self._is_silent = self._loses_answers = False

    # -- the connections --

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self._refuses:
            writer.transport.abort()
            return
        await self._carries.wait()
        try:
            answers, asks = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            return
        self._to_clients.add(writer)
        self._to_server.add(asks)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, asks, is_answer=False))
                pumps.create_task(self._pump(answers, writer, is_answer=True))
        finally:
            asks.close()
            self._to_clients.discard(writer)
            self._to_server.discard(asks)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool) -> None:
        with suppress(ConnectionError):
            while data := await source.read(_CHUNK_BYTES):
                await self._carries.wait()
                if self._is_silent or sink in self._stranded or (is_answer and self._loses_answers):
                    continue
                sink.write(data)
                await sink.drain()
                if not is_answer:
                    self.client_chunks.append(data)
        await self._carries.wait()
        sink.close()  # which ends the other direction, too
