"""A stream for programs that block, over either protocol."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from pagestream_client.chunks import Chunk
from pagestream_client.endpoints import Endpoints
from pagestream_client.errors import Position, StreamClosed
from pagestream_client.failures import Failure
from pagestream_client.generations import Generation, put_together
from pagestream_client.resumable_stream import ResumableStream


class Stream(ABC):
    """The chunks of one request, each once and in order, over as many connections as it takes.

    Iterate over it; leaving its `with` block, or `close`, ends it early. One thread reads it; any thread may close it.
    """

    def __init__(self, state: ResumableStream, endpoints: Endpoints) -> None:
        """Clients make streams; see their `generate` and `resume`."""
        self._state = state
        self._endpoints = endpoints
        self._target = ""
        self._ahead: Chunk | None = None
        self._closing = threading.Event()
        self._abandoned = False

    @property
    def request_id(self) -> str:
        """Empty until a gateway has accepted the request; see `accepted`."""
        return self._state.position.request_id

    @property
    def position(self) -> Position:
        """The place after the last chunk that was read: what the client's `resume` takes."""
        return self._state.position

    def accepted(self) -> str:
        """Wait until a gateway has durably accepted the request; return its id. Raises as iterating does."""
        while not self._state.is_accepted:
            self._ahead = self._advance()
        return self.request_id

    def collect(self) -> Generation:
        """Read the rest of the answer and put it together. Raises as iterating does."""
        return put_together(self)

    def __iter__(self) -> Self:
        """Return the stream, which is its own iterator."""
        return self

    def __next__(self) -> Chunk:
        """Return the next chunk. Raises the errors of `pagestream_client.errors`."""
        chunk, self._ahead = self._ahead, None
        while chunk is None:
            if self._closing.is_set() and not self._abandoned:
                raise StopIteration
            if self._state.is_over:
                self._finish()
                self._state.raise_failure()
                raise StopIteration
            chunk = self._advance()
        return chunk

    def __enter__(self) -> Self:
        """Return the stream, which is open already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def __del__(self) -> None:
        """End the call of a loop that was left by `break`, as `close` does."""
        self._hang_up()

    def close(self) -> None:
        """End the reading at once; a running request is treated as its `on_disconnect` says. Idempotent."""
        self._closing.set()
        self._hang_up()

    def abandon(self) -> None:
        """Close it because the client closes: its reader gets StreamClosed."""
        self._abandoned = not (self._closing.is_set() or self._state.is_over)
        self._closing.set()
        self._hang_up()

    def _advance(self) -> Chunk | None:
        """Read one message, or make up for one failed call with the pause after it."""
        if self._closing.is_set():
            raise StreamClosed("the stream was closed before it had ended")
        try:
            is_open, chunk = self._read()
        except Exception as error:
            failure = self._failure_of(error)
            self._hang_up()
            if failure is None:
                raise
            if self._closing.is_set():
                return None  # the call failed because it was closed
            delay_s = self._state.failed(failure, self._target)
        except BaseException:  # KeyboardInterrupt, wherever the main thread waits
            self._hang_up()
            raise
        else:
            if is_open:
                return chunk
            self._hang_up()
            delay_s = 0.0 if self._state.is_over else self._state.ended(self._target)
        if not self._state.is_over:
            self._closing.wait(delay_s)
        return None

    @abstractmethod
    def _read(self) -> tuple[bool, Chunk | None]:
        """Read one message of the current call, which is begun where there is none. Returns whether the call is still
        open, and the message's chunk, if it has one.
        """

    @abstractmethod
    def _failure_of(self, error: Exception) -> Failure | None:
        """Return what an error of `_read` says of the call; None where it is not the call's."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait briefly for the proper end of a call whose last chunk has come."""

    @abstractmethod
    def _hang_up(self) -> None:
        """End the current call, if there is one. Called from any thread."""
