"""Transports for the `openai` client that resume its streams at another gateway when a connection dies.

```python
urls = ["http://gateway-0:8000", "http://gateway-1:8000"]
client = openai.OpenAI(base_url=f"{urls[0]}/v1", http_client=httpx2.Client(transport=ResumingTransport(urls)))
```
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence

from pagestream_client.errors import PagestreamError
from pagestream_client.failures import Failure
from pagestream_client.http.answers import DONE
from pagestream_client.http.configuration import HttpConfiguration, call_failure
from pagestream_client.http.failures import CallRefused, failure_of_answer
from pagestream_client.http.library import import_httpx2
from pagestream_client.http.requests import CHAT_COMPLETIONS, COMPLETIONS, HttpRequest
from pagestream_client.http.sse import Event, SseDecoder
from pagestream_client.http.stream_state import HttpStreamState
from pagestream_client.http.transport import HttpTransport
from pagestream_client.settings import Reconnection

import_httpx2()  # before the import below, so that its error names the extra
import httpx2  # noqa: E402

_DROPPED_HEADERS = ("host", "content-length", "content-type", "idempotency-key", "accept-encoding")
"""Set for each call, or none: events are decoded from the raw body, so it must not be compressed."""
_DONE_BYTES = f"data: {DONE}\n\n".encode()


class _ResumableCall:
    """One stream of the `openai` client: its state, and the requests that are sent for it. Does no I/O."""

    def __init__(self, configuration: HttpConfiguration, request: httpx2.Request) -> None:
        key = request.headers.get("idempotency-key") or uuid.uuid4().hex
        self._request = request
        self._configuration = configuration
        self._decoder = SseDecoder()
        # A resumed stream has ids always; its reader gets them where the first one has them.
        self._with_ids = request.headers.get("x-stream-ids", "").lower() == "true"
        self.state: HttpStreamState = configuration.stream_state(
            HttpRequest(request.url.path, json.loads(request.content), key)
        )
        self.target = ""

    def next_request(self) -> httpx2.Request:
        """Return the request to send now."""
        call, self.target = self.state.next_call(), self._configuration.endpoints.current
        self._decoder = SseDecoder()
        headers = {name: value for name, value in self._request.headers.items() if name not in _DROPPED_HEADERS}
        limits = self._configuration.transport
        timeout = {"connect": limits.connect_timeout_s, "read": limits.read_timeout_s, "write": limits.read_timeout_s}
        return httpx2.Request(
            call.method,
            self.target + call.path,
            headers={**headers, **call.headers},
            json=call.body,
            extensions={**self._request.extensions, "timeout": {**timeout, "pool": limits.connect_timeout_s}},
        )

    def events(self, data: bytes) -> Generator[bytes, None, None]:
        """Yield the events that are complete with these bytes, encoded again. Raises CallRefused."""
        self.state.note_sign()
        for event in self._decoder.feed(data):
            self.state.take(event, self.target)
            yield _encode(event, with_id=self._with_ids)

    def delay_s(self, error: Exception | None) -> float:
        """Return the seconds until the next call, after one that failed, or that ended too early (None).

        Raises:
            Exception: `error`, or ReadError, where no further call is made.
        """
        failure: Failure | None = None if error is None else call_failure(error)
        if error is not None and failure is None:
            raise error
        try:
            return self.state.ended(self.target) if failure is None else self.state.failed(failure, self.target)
        except PagestreamError as last:
            if isinstance(error, httpx2.TransportError):
                raise error from last
            raise httpx2.ReadError(str(last)) from last


class ResumingTransport(httpx2.BaseTransport):
    """Send requests to any of several gateways, and resume streams of completions where a connection dies.

    Args:
        urls: base URL of each gateway; they replace that of the `openai` client.
        reconnection: limits of retries.
        limits: time limits of connections and streams; they replace those of the `openai` client for streams.
        inner: sends the requests; `httpx2.HTTPTransport()` where it is not given.

    Raises:
        ValueError: a URL is not http(s)://host[:port].
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        reconnection: Reconnection | None = None,
        limits: HttpTransport | None = None,
        inner: httpx2.BaseTransport | None = None,
    ) -> None:
        self._configuration = HttpConfiguration(urls, api_key=None, reconnection=reconnection, transport=limits)
        self._inner = inner or httpx2.HTTPTransport()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; the body of a stream is resumed while it is read."""
        request.read()
        if not _is_stream(request):
            return _once(self._configuration, request, self._inner)
        call = _ResumableCall(self._configuration, request)
        response = self.open(call)
        if response.status_code != 200:
            return response  # the `openai` client has its own retries of refusals
        call.state.opened(response.headers.get("x-request-id", ""))
        return httpx2.Response(200, headers=_headers(response), stream=_ResumedStream(self, call, response))

    def open(self, call: _ResumableCall) -> httpx2.Response:
        """Send the next request of a stream, as often as it takes until a gateway answers."""
        while True:
            try:
                return self._inner.handle_request(call.next_request())
            except httpx2.TransportError as error:
                delay_s = call.delay_s(error)
            time.sleep(delay_s)

    def close(self) -> None:
        """Close all connections."""
        self._inner.close()


class _ResumedStream(httpx2.SyncByteStream):
    """The body of a stream over any number of responses."""

    def __init__(self, transport: ResumingTransport, call: _ResumableCall, response: httpx2.Response) -> None:
        self._transport = transport
        self._call = call
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        call = self._call
        while True:
            failed: Exception | None = None
            try:
                if self._response.status_code != 200:
                    raise _refusal(self._response, self._response.read())
                for data in self._response.iter_raw():
                    yield from call.events(data)
            except (httpx2.TransportError, CallRefused) as error:
                failed = error
            finally:
                self._response.close()
            if call.state.is_over:
                yield from () if failed is None else (_DONE_BYTES,)
                return
            time.sleep(call.delay_s(failed))
            self._response = self._transport.open(call)

    def close(self) -> None:
        self._response.close()


class AsyncResumingTransport(httpx2.AsyncBaseTransport):
    """The same for `openai.AsyncOpenAI`; see ResumingTransport."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        reconnection: Reconnection | None = None,
        limits: HttpTransport | None = None,
        inner: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._configuration = HttpConfiguration(urls, api_key=None, reconnection=reconnection, transport=limits)
        self._inner = inner or httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; the body of a stream is resumed while it is read."""
        await request.aread()
        if not _is_stream(request):
            return await _once_async(self._configuration, request, self._inner)
        call = _ResumableCall(self._configuration, request)
        response = await self.open(call)
        if response.status_code != 200:
            return response  # the `openai` client has its own retries of refusals
        call.state.opened(response.headers.get("x-request-id", ""))
        return httpx2.Response(200, headers=_headers(response), stream=_AsyncResumedStream(self, call, response))

    async def open(self, call: _ResumableCall) -> httpx2.Response:
        """Send the next request of a stream, as often as it takes until a gateway answers."""
        while True:
            try:
                return await self._inner.handle_async_request(call.next_request())
            except httpx2.TransportError as error:
                delay_s = call.delay_s(error)
            await asyncio.sleep(delay_s)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._inner.aclose()


class _AsyncResumedStream(httpx2.AsyncByteStream):
    """The body of a stream over any number of responses."""

    def __init__(self, transport: AsyncResumingTransport, call: _ResumableCall, response: httpx2.Response) -> None:
        self._transport = transport
        self._call = call
        self._response = response

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces()

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        call = self._call
        while True:
            failed: Exception | None = None
            try:
                if self._response.status_code != 200:
                    raise _refusal(self._response, await self._response.aread())
                async for data in self._response.aiter_raw():
                    for event in call.events(data):
                        yield event
            except (httpx2.TransportError, CallRefused) as error:
                failed = error
            finally:
                await self._response.aclose()
            if call.state.is_over:
                if failed is not None:
                    yield _DONE_BYTES
                return
            await asyncio.sleep(call.delay_s(failed))
            self._response = await self._transport.open(call)

    async def aclose(self) -> None:
        await self._response.aclose()


def _is_stream(request: httpx2.Request) -> bool:
    if request.method != "POST" or request.url.path not in (COMPLETIONS, CHAT_COMPLETIONS):
        return False
    try:
        return json.loads(request.content).get("stream") is True
    except (ValueError, AttributeError):
        return False  # the gateway's refusal says what is wrong


def _once(configuration: HttpConfiguration, request: httpx2.Request, inner: httpx2.BaseTransport) -> httpx2.Response:
    """Send a request to the current gateway. A failure makes another one current for the client's retry."""
    target = configuration.endpoints.current
    try:
        response = inner.handle_request(_redirected(request, target))
    except httpx2.TransportError:
        configuration.endpoints.failed(target)
        raise
    configuration.endpoints.worked(target)
    return response


async def _once_async(
    configuration: HttpConfiguration, request: httpx2.Request, inner: httpx2.AsyncBaseTransport
) -> httpx2.Response:
    target = configuration.endpoints.current
    try:
        response = await inner.handle_async_request(_redirected(request, target))
    except httpx2.TransportError:
        configuration.endpoints.failed(target)
        raise
    configuration.endpoints.worked(target)
    return response


def _redirected(request: httpx2.Request, target: str) -> httpx2.Request:
    headers = [(name, value) for name, value in request.headers.items() if name != "host"]
    url = target + request.url.raw_path.decode("ascii")
    return httpx2.Request(request.method, url, headers=headers, content=request.content, extensions=request.extensions)


def _refusal(response: httpx2.Response, content: bytes) -> CallRefused:
    return CallRefused(failure_of_answer(response.status_code, response.headers, content))


def _headers(response: httpx2.Response) -> list[tuple[str, str]]:
    return [
        (name, value)
        for name, value in response.headers.items()
        if name not in ("content-length", "transfer-encoding", "content-encoding")
    ]


def _encode(event: Event, *, with_id: bool) -> bytes:
    data = "".join(f"data: {line}\n" for line in event.data.split("\n"))
    return (f"id: {event.id}\n" if with_id and event.id else "").encode() + f"{data}\n".encode()
