"""A transport for the `openai` client that continues its requests at another gateway when one dies.

```python
urls = ["http://gateway-0:8000", "http://gateway-1:8000"]
http = httpx2.Client(transport=pagestream_client.openai.transport(urls))  # httpx2.AsyncClient for AsyncOpenAI
client = openai.OpenAI(base_url=f"{urls[0]}/v1", http_client=http)
```
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

import httpx2

from pagestream_client.openai.calls import DONE_BYTES, Call, StreamedCall, call_of, headers_of_stream
from pagestream_client.openai.configuration import HttpConfiguration, HttpTransport
from pagestream_client.openai.failures import CallRefused
from pagestream_client.retry import Reconnection


def transport(
    urls: str | Sequence[str], *, reconnection: Reconnection | None = None, limits: HttpTransport | None = None
) -> ResumingTransport:
    """Return a transport over any of several gateways, for `httpx2.Client` and `httpx2.AsyncClient`.

    Args:
        urls: base URL of each gateway, with or without `/v1`; they replace that of the `openai` client.
        limits: time limits of connections and streams, and whom TLS trusts; they replace those of the `openai` client
            for streams. An answer that is not streamed has the client's own limits, its read limit for all tries.

    Raises:
        ImportError: the extra `pagestream-client[http]` is not installed.
        OSError: the file of certificates can't be read.
        ValueError: a URL is not http(s)://host[:port].
    """
    return ResumingTransport(urls, reconnection=reconnection, limits=limits)


class ResumingTransport(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """Continue completions and chat completions by their request where a gateway dies, streamed or not.

    A stream is resumed from its last event; an answer that is not streamed is asked for again with the key of the first
    try, which joins the same request. Other requests go to the current gateway once. See `transport` for the arguments.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        reconnection: Reconnection | None = None,
        limits: HttpTransport | None = None,
    ) -> None:
        self._configuration = HttpConfiguration(urls, reconnection=reconnection, transport=limits)
        self._verify = self._configuration.trust()
        self._lock = threading.Lock()
        self._blocking: httpx2.HTTPTransport | None = None
        self._async: httpx2.AsyncHTTPTransport | None = None

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, as often as it takes; the body of a stream is resumed while it is read."""
        request.read()
        call = call_of(self._configuration, request)
        response = self.open(call)
        if isinstance(call, StreamedCall) and response.status_code == 200:
            stream = _ResumedStream(self, call, response)
            return httpx2.Response(200, headers=headers_of_stream(response), stream=stream)
        return response

    def open(self, call: Call) -> httpx2.Response:
        """Send a call's next requests until a gateway answers, or refuses for good. Raises TransportError."""
        with self._lock:
            if self._blocking is None:
                self._blocking = httpx2.HTTPTransport(verify=self._verify)
        while True:
            try:
                response = self._blocking.handle_request(call.next_request())
            except httpx2.TransportError as error:
                time.sleep(call.delay_s(error))
                continue
            if not call.is_refused(response):
                if call.answered(response):
                    return response
                _read(response)
                continue
            delay_s = call.delay_after(response, _read(response))
            if delay_s is None:
                return response
            time.sleep(delay_s)

    def close(self) -> None:
        """Close all connections of blocking calls."""
        if self._blocking is not None:
            self._blocking.close()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, as often as it takes; the body of a stream is resumed while it is read."""
        await request.aread()
        call = call_of(self._configuration, request)
        response = await self.open_async(call)
        if isinstance(call, StreamedCall) and response.status_code == 200:
            stream = _AsyncResumedStream(self, call, response)
            return httpx2.Response(200, headers=headers_of_stream(response), stream=stream)
        return response

    async def open_async(self, call: Call) -> httpx2.Response:
        """Send a call's next requests until a gateway answers, or refuses for good. Raises TransportError."""
        if self._async is None:
            self._async = httpx2.AsyncHTTPTransport(verify=self._verify)
        while True:
            try:
                response = await self._async.handle_async_request(call.next_request())
            except httpx2.TransportError as error:
                await asyncio.sleep(call.delay_s(error))
                continue
            if not call.is_refused(response):
                if call.answered(response):
                    return response
                await _aread(response)
                continue
            delay_s = call.delay_after(response, await _aread(response))
            if delay_s is None:
                return response
            await asyncio.sleep(delay_s)

    async def aclose(self) -> None:
        """Close all connections of asynchronous calls."""
        if self._async is not None:
            await self._async.aclose()


class _ResumedStream(httpx2.SyncByteStream):
    """The body of a stream over any number of answers."""

    def __init__(self, opener: ResumingTransport, call: StreamedCall, response: httpx2.Response) -> None:
        self._opener = opener
        self._call = call
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        call = self._call
        while True:
            failed: Exception | None = None
            try:
                for data in self._response.iter_raw():
                    yield from call.events(data)
            except (httpx2.TransportError, CallRefused) as error:
                failed = error
            finally:
                self._response.close()
            if call.state.is_over:
                yield from () if failed is None else (DONE_BYTES,)
                return
            time.sleep(call.ended_delay_s() if failed is None else call.delay_s(failed))
            self._response = self._opener.open(call)

    def close(self) -> None:
        self._response.close()


class _AsyncResumedStream(httpx2.AsyncByteStream):
    """The body of a stream over any number of answers."""

    def __init__(self, opener: ResumingTransport, call: StreamedCall, response: httpx2.Response) -> None:
        self._opener = opener
        self._call = call
        self._response = response

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces()

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        call = self._call
        while True:
            failed: Exception | None = None
            try:
                async for data in self._response.aiter_raw():
                    for event in call.events(data):
                        yield event
            except (httpx2.TransportError, CallRefused) as error:
                failed = error
            finally:
                await self._response.aclose()
            if call.state.is_over:
                if failed is not None:
                    yield DONE_BYTES
                return
            await asyncio.sleep(call.ended_delay_s() if failed is None else call.delay_s(failed))
            self._response = await self._opener.open_async(call)

    async def aclose(self) -> None:
        await self._response.aclose()


def _read(response: httpx2.Response) -> bytes:
    """Read and close an answer that is not passed on."""
    try:
        return response.read()
    finally:
        response.close()


async def _aread(response: httpx2.Response) -> bytes:
    try:
        return await response.aread()
    finally:
        await response.aclose()
