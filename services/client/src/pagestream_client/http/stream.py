"""A stream over HTTP for programs that block."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pagestream_client.chunks import Chunk
from pagestream_client.errors import StreamClosed
from pagestream_client.failures import Code, Failure
from pagestream_client.http.configuration import HttpConfiguration, call_failure
from pagestream_client.http.failures import CallRefused, failure_of_answer
from pagestream_client.http.library import import_httpx2
from pagestream_client.http.sse import Event, SseDecoder
from pagestream_client.http.stream_state import END_LIMIT_S, HttpStreamState
from pagestream_client.stream import Stream

if TYPE_CHECKING:
    import httpx2


class HttpStream(Stream):
    """A stream of server-sent events."""

    _state: HttpStreamState

    def __init__(self, configuration: HttpConfiguration, state: HttpStreamState, http: httpx2.Client) -> None:
        super().__init__(state, configuration.endpoints)
        self._http = http
        self._response: httpx2.Response | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._decoder = SseDecoder()
        self._events: deque[Event] = deque()
        self._reading = threading.Lock()

    def _read(self) -> tuple[bool, Chunk | None]:
        with self._reading:
            if self._response is None:
                self._open()
                return True, None  # the headers have the request id
            if self._closing.is_set():  # by another thread, which did not see this response
                raise CallRefused(Failure(Code.CANCELLED, "the stream was closed"))
            while not self._events:
                data = next(self._pieces, None)
                if data is None:
                    return False, None
                self._state.note_sign()
                self._events.extend(self._decoder.feed(data))
            return True, self._state.take(self._events.popleft(), self._target)

    def _open(self) -> None:
        if self._http.is_closed:
            raise StreamClosed("the client is closed")
        call, self._target = self._state.next_call(), self._endpoints.current
        self._decoder = SseDecoder()
        request = self._http.build_request(
            call.method, self._target + call.path, json=call.body, headers=dict(call.headers)
        )
        response = self._response = self._http.send(request, stream=True)
        if response.status_code != 200:
            raise CallRefused(failure_of_answer(response.status_code, response.headers, response.read()))
        self._state.opened(response.headers)
        if call.is_stream:
            self._pieces = response.iter_raw()
        else:
            response.read()
            self._response = None

    def _failure_of(self, error: Exception) -> Failure | None:
        return call_failure(error)

    def _finish(self) -> None:
        response = self._response
        limit = threading.Timer(END_LIMIT_S, lambda: None if response is None else _shut_down(response))
        limit.start()
        try:
            with suppress(import_httpx2().TransportError):  # the log has ended; how the connection ends changes nothing
                for _ in self._pieces:
                    pass
        finally:
            limit.cancel()
            self._hang_up()

    def _hang_up(self) -> None:
        response = self._response
        if response is None:
            return
        if self._reading.acquire(blocking=False):
            try:
                self._response, self._pieces, self._events = None, iter(()), deque()
                response.close()
            finally:
                self._reading.release()
        else:  # another thread waits for bytes: end its wait, and it closes the response
            _shut_down(response)


def _shut_down(response: httpx2.Response) -> None:
    """End the wait of the thread that reads the response."""
    stream = response.extensions.get("network_stream")
    connection = stream.get_extra_info("socket") if stream is not None else None
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
