"""A stream for asyncio, over either protocol."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from types import TracebackType
from typing import Self

from pagestream_client.chunks import Chunk
from pagestream_client.endpoints import Endpoints
from pagestream_client.errors import Position, StreamClosed
from pagestream_client.failures import Failure
from pagestream_client.generations import Generation, put_together
from pagestream_client.resumable_stream import ResumableStream


class AsyncStream(ABC):
    """The chunks of one request, each once and in order, over as many connections as it takes.

    Iterate over it; leaving its `async with` block, or `aclose`, ends it early. One task reads it.
    """

    def __init__(self, state: ResumableStream, endpoints: Endpoints) -> None:
        """Clients make streams; see their `generate` and `resume`."""
        self._state = state
        self._endpoints = endpoints
        self._target = ""
        self._ahead: Chunk | None = None
        self._closing = asyncio.Event()
        self._abandoned = False

    @property
    def request_id(self) -> str:
        """Empty until a gateway has accepted the request; see `accepted`."""
        return self._state.position.request_id

    @property
    def position(self) -> Position:
        """The place after the last chunk that was read: what the client's `resume` takes."""
        return self._state.position

    async def accepted(self) -> str:
        """Wait until a gateway has durably accepted the request; return its id. Raises as iterating does."""
        while not self._state.is_accepted:
            self._ahead = await self._advance()
        return self.request_id

    async def collect(self) -> Generation:
        """Read the rest of the answer and put it together. Raises as iterating does."""
        return put_together([chunk async for chunk in self])

    def __aiter__(self) -> Self:
        """Return the stream, which is its own iterator."""
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk. Raises the errors of `pagestream_client.errors`."""
        chunk, self._ahead = self._ahead, None
        while chunk is None:
            if self._closing.is_set() and not self._abandoned:
                raise StopAsyncIteration
            if self._state.is_over:
                await self._finish()
                self._state.raise_failure()
                raise StopAsyncIteration
            chunk = await self._advance()
        return chunk

    async def __aenter__(self) -> Self:
        """Return the stream, which is open already."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.aclose()

    def __del__(self) -> None:
        """End the call of a loop that was left by `break`, as `aclose` does."""
        with suppress(RuntimeError):  # the event loop may be closed by now
            self._interrupt()

    async def aclose(self) -> None:
        """End the reading at once; a running request is treated as its `on_disconnect` says. Idempotent."""
        self._closing.set()
        self._interrupt()
        await self._hang_up()

    def abandon(self) -> None:
        """Close it because the client closes: its reader gets StreamClosed."""
        self._abandoned = not (self._closing.is_set() or self._state.is_over)
        self._closing.set()
        self._interrupt()

    async def _advance(self) -> Chunk | None:
        """Read one message, or make up for one failed call with the pause after it."""
        if self._closing.is_set():
            raise StreamClosed("the stream was closed before it had ended")
        try:
            is_open, chunk = await self._read()
        except asyncio.CancelledError:
            await self._hang_up()
            if self._closing.is_set() and not is_cancelled():
                return None  # the call was cancelled because the stream was closed
            raise
        except Exception as error:
            failure = self._failure_of(error)
            await self._hang_up()
            if failure is None:
                raise
            if self._closing.is_set():
                return None  # the call failed because the stream was closed
            delay_s = self._state.failed(failure, self._target)
        else:
            if is_open:
                return chunk
            await self._hang_up()
            delay_s = 0.0 if self._state.is_over else self._state.ended(self._target)
        if not self._state.is_over:
            await self._pause(delay_s)
        return None

    async def _pause(self, delay_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._closing.wait()

    @abstractmethod
    async def _read(self) -> tuple[bool, Chunk | None]:
        """Read one message of the current call, which is begun where there is none. Returns whether the call is still
        open, and the message's chunk, if it has one.
        """

    @abstractmethod
    def _failure_of(self, error: Exception) -> Failure | None:
        """Return what an error of `_read` says of the call; None where it is not the call's."""

    @abstractmethod
    async def _finish(self) -> None:
        """Wait briefly for the proper end of a call whose last chunk has come."""

    @abstractmethod
    def _interrupt(self) -> None:
        """End the current call, if there is one, and a read that waits for it."""

    @abstractmethod
    async def _hang_up(self) -> None:
        """Release what the current call holds, if there is one."""


def is_cancelled() -> bool:
    """Whether the current task is being cancelled; else its CancelledError comes from a call that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
