"""A stream over HTTP for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pagestream_client.async_stream import AsyncStream
from pagestream_client.chunks import Chunk
from pagestream_client.errors import StreamClosed
from pagestream_client.failures import Code, Failure
from pagestream_client.http.configuration import HttpConfiguration, call_failure
from pagestream_client.http.failures import CallRefused, failure_of_answer
from pagestream_client.http.library import import_httpx2
from pagestream_client.http.sse import Event, SseDecoder
from pagestream_client.http.stream_state import END_LIMIT_S, HttpStreamState

if TYPE_CHECKING:
    import httpx2


class AsyncHttpStream(AsyncStream):
    """A stream of server-sent events."""

    _state: HttpStreamState

    def __init__(self, configuration: HttpConfiguration, state: HttpStreamState, http: httpx2.AsyncClient) -> None:
        super().__init__(state, configuration.endpoints)
        self._http = http
        self._response: httpx2.Response | None = None
        self._pieces: AsyncIterator[bytes] | None = None
        self._decoder = SseDecoder()
        self._events: deque[Event] = deque()
        self._reading: asyncio.Timeout | None = None

    def __del__(self) -> None:
        """Close the response of a loop that was left by `break`."""
        with suppress(RuntimeError):  # no event loop runs any more
            loop = asyncio.get_running_loop()
            if self._response is not None:
                loop.create_task(self._response.aclose())  # noqa: RUF006 -- the loop holds it while it waits for I/O

    async def _read(self) -> tuple[bool, Chunk | None]:
        if not self._events:
            try:
                async with asyncio.timeout(None) as self._reading:
                    if self._pieces is None:
                        self._pieces = await self._open()
                        return True, None  # the headers have the request id
                    is_open = await self._receive(self._pieces)
            except TimeoutError as error:  # `_interrupt` has set it; the library's timeouts are of other types
                raise CallRefused(Failure(Code.CANCELLED, "the stream was closed")) from error
            finally:
                self._reading = None
            if not is_open:
                return False, None
        return True, self._state.take(self._events.popleft(), self._target)

    async def _receive(self, pieces: AsyncIterator[bytes]) -> bool:
        """Wait for an event. Returns False at the end of the body."""
        while not self._events:
            data = await anext(pieces, None)
            if data is None:
                return False
            self._state.note_sign()
            self._events.extend(self._decoder.feed(data))
        return True

    async def _open(self) -> AsyncIterator[bytes] | None:
        if self._http.is_closed:
            raise StreamClosed("the client is closed")
        call, self._target = self._state.next_call(), self._endpoints.current
        self._decoder = SseDecoder()
        request = self._http.build_request(
            call.method, self._target + call.path, json=call.body, headers=dict(call.headers)
        )
        response = self._response = await self._http.send(request, stream=True)
        if response.status_code != 200:
            raise CallRefused(failure_of_answer(response.status_code, response.headers, await response.aread()))
        self._state.opened(response.headers)
        if call.is_stream:
            return response.aiter_raw()
        await response.aread()
        self._response = None
        return None

    def _failure_of(self, error: Exception) -> Failure | None:
        return call_failure(error)

    async def _finish(self) -> None:
        try:
            # The log has ended; how the connection ends changes nothing.
            with suppress(TimeoutError, import_httpx2().TransportError):
                async with asyncio.timeout(END_LIMIT_S):
                    while self._pieces is not None and await anext(self._pieces, None) is not None:
                        pass
        finally:
            await self._hang_up()

    def _interrupt(self) -> None:
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(asyncio.get_running_loop().time())

    async def _hang_up(self) -> None:
        if self._reading is not None:
            return  # the task that reads was interrupted, and closes the response
        response = self._response
        self._response, self._pieces, self._events = None, None, deque()
        if response is not None:
            await response.aclose()
