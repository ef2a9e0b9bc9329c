"""A stream for asyncio."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc
from pagestream.v1 import inference_pb2 as api

from pagestream_client.chunks import Chunk
from pagestream_client.connections import Connection, Connections
from pagestream_client.core import ClientCore
from pagestream_client.errors import Position, StreamClosed
from pagestream_client.generations import Generation, put_together
from pagestream_client.pursuit import Pursuit
from pagestream_client.status import failure_of

_STATUS_LIMIT_S = 1.0  # after the last chunk: whole calls end with a status, and count as such


class AsyncStream:
    """The chunks of one request, each once and in order, over as many connections as it takes.

    Iterate over it; `async with`, or `aclose`, ends it early. One task reads it.
    """

    def __init__(self, core: ClientCore, pursuit: Pursuit, connections: Connections) -> None:
        """For AsyncClient."""
        self._core = core
        self._pursuit = pursuit
        self._connections = connections
        self._connection: Connection | None = None
        self._call: Any = None
        self._target = ""
        self._ahead: Chunk | None = None
        self._closing = asyncio.Event()
        self._abandoned = False

    @property
    def request_id(self) -> str:
        """Empty until a gateway has accepted the request; see `accepted`."""
        return self._pursuit.position.request_id

    @property
    def position(self) -> Position:
        """Where the stream stands after the last chunk that was taken: what `AsyncClient.resume` takes."""
        return self._pursuit.position

    async def accepted(self) -> str:
        """Waits until a gateway has durably accepted the request; returns its id. Raises as iterating does."""
        while not self._pursuit.is_accepted:
            self._ahead = await self._advance()
        return self.request_id

    async def collect(self) -> Generation:
        """The whole answer, from here on. Raises as iterating does."""
        return put_together([chunk async for chunk in self])

    def __aiter__(self) -> Self:
        """The stream is its own iterator."""
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk. Raises the errors of `pagestream_client.errors`."""
        chunk, self._ahead = self._ahead, None
        while chunk is None:
            if self._closing.is_set() and not self._abandoned:
                raise StopAsyncIteration
            if self._pursuit.is_over:
                await self._finish()
                raise StopAsyncIteration
            chunk = await self._advance()
        return chunk

    async def __aenter__(self) -> Self:
        """It is open already."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        await self.aclose()

    def __del__(self) -> None:
        """A loop that is left by `break` ends the call, as closing does."""
        with suppress(RuntimeError):  # the event loop may be closed by now
            self._hang_up()

    async def aclose(self) -> None:
        """Ends the reading at once; a request that runs meets its `on_disconnect`. Closing again changes nothing."""
        self._closing.set()
        self._hang_up()

    def abandon(self) -> None:
        """The client closes: whoever reads hears StreamClosed."""
        self._abandoned = not (self._closing.is_set() or self._pursuit.is_over)
        self._closing.set()
        self._hang_up()

    async def _advance(self) -> Chunk | None:
        """One message, or one failed call and the pause after it."""
        if self._closing.is_set():
            raise StreamClosed("the stream was closed before it had ended")
        try:
            response = await self._read()
        except grpc.RpcError as error:
            connection = self._connection
            self._hang_up()
            if self._closing.is_set():
                return None
            failure = failure_of(error)
            self._connections.failed(connection, failure)
            delay_s = self._pursuit.failed(failure, self._target)
        except asyncio.CancelledError:
            self._hang_up()
            if self._closing.is_set() and not is_cancelled():
                return None  # it was our own hanging up
            raise
        else:
            if response is not None:
                return self._taken(response)
            self._hang_up()
            delay_s = self._pursuit.ended(self._target)
        if not self._pursuit.is_over:
            await self._pause(delay_s)
        return None

    async def _pause(self, delay_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._closing.wait()

    def _taken(self, response: Any) -> Chunk | None:
        try:
            return self._pursuit.take(response, self._target)
        except BaseException:
            self._hang_up()
            raise

    async def _read(self) -> Any:
        """The next message; None at the call's end."""
        if self._call is None:
            call, self._target = self._pursuit.next_call(), self._core.endpoints.current
            connection = self._connection = self._connections.to(self._target)
            stub = connection.stub
            method = stub.Generate if isinstance(call.request, api.GenerateRequest) else stub.Resume
            self._call = method(call.request, timeout=call.timeout_s, metadata=self._core.metadata)
        answer = await self._call.read()
        return None if answer is grpc.aio.EOF else answer

    async def _finish(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            try:
                with suppress(TimeoutError):  # the log has ended; how this connection ends changes nothing
                    async with asyncio.timeout(_STATUS_LIMIT_S):
                        await call.code()
            finally:
                call.cancel()
                self._connection = None
        self._pursuit.raise_failure()

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._connection = None  # only now: it may be the last that holds it


def is_cancelled() -> bool:
    """Whether somebody cancels the current task; else its CancelledError comes from a gRPC call that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
