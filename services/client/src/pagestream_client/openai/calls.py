"""The calls of one request of the `openai` client, over any number of gateways. Does no I/O."""

from __future__ import annotations

import json
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import httpx2

from pagestream_client.errors import PagestreamError
from pagestream_client.openai.configuration import HttpConfiguration, call_failure
from pagestream_client.openai.failures import CallRefused, failure_of_answer
from pagestream_client.openai.stream_state import CHAT_COMPLETIONS, COMPLETIONS, DONE, HttpRequest, HttpStreamState
from pagestream_client.retry import Failure
from pagestream_client.sse import Event, SseDecoder

_RETRIED_STATUSES = (502, 503, 504)
"""A gateway that stops or has no Redis, and proxies without a gateway. Other refusals are the client's to handle."""
_DROPPED_HEADERS = ("host", "content-length", "content-type", "idempotency-key", "accept-encoding")
"""Set for each call of a stream, or none: events are decoded from the raw body, so it must not be compressed."""
DONE_BYTES = f"data: {DONE}\n\n".encode()


def call_of(configuration: HttpConfiguration, request: httpx2.Request) -> Call:
    """Return the call of a request whose body has been read."""
    if request.method != "POST" or request.url.path not in (COMPLETIONS, CHAT_COMPLETIONS):
        return Call(configuration, request)
    try:
        body = json.loads(request.content)
    except ValueError:
        body = None  # the gateway's refusal says what is wrong
    if isinstance(body, dict) and body.get("stream") is True:
        return StreamedCall(configuration, request, body)
    return WholeCall(configuration, request)


class Call:
    """A request that any gateway answers: sent to the current one, and not repeated here."""

    def __init__(self, configuration: HttpConfiguration, request: httpx2.Request) -> None:
        self._configuration = configuration
        self._request = request
        self.target = ""

    @property
    def is_accepted(self) -> bool:
        """Whether a gateway has begun to answer, so that a refusal is no answer any more."""
        return False

    def next_request(self) -> httpx2.Request:
        """Return the request to send now."""
        self.target = self._configuration.endpoints.current
        request = self._request
        own = self._own_headers()
        headers = [(name, value) for name, value in request.headers.multi_items() if name not in {"host", *own}]
        return httpx2.Request(
            request.method,
            self.target + request.url.raw_path.decode("ascii"),
            headers=[*headers, *own.items()],
            content=request.content,
            extensions=self._extensions(),
        )

    def is_refused(self, response: httpx2.Response) -> bool:
        """Whether another gateway may answer what this one does not."""
        return False

    def answered(self, response: httpx2.Response) -> bool:
        """Note an answer; return whether it is that of the request."""
        self._configuration.endpoints.worked(self.target)
        return True

    def delay_after(self, response: httpx2.Response, content: bytes) -> float | None:
        """Return the seconds until the next call, after one that was refused; None where the refusal is the answer.

        Raises ReadError where a stream that has begun cannot be continued.
        """
        error = CallRefused(failure_of_answer(response.status_code, response.headers, content))
        try:
            return self.delay_s(error)
        except httpx2.ReadError:
            if self.is_accepted:
                raise
            return None

    def delay_s(self, error: Exception) -> float:
        """Return the seconds until the next call, after one that failed. Raises `error` where there is none."""
        self._configuration.endpoints.failed(self.target)  # the client's own retry goes to another one
        raise error

    def _own_headers(self) -> dict[str, str]:
        """Return headers in place of the request's."""
        return {}

    def _extensions(self) -> dict[str, Any]:
        """Return the extensions of the next request, such as its limits."""
        return dict(self._request.extensions)


class _RepeatedCall(Call, ABC):
    """A generation, which is repeated until a gateway answers it: its key makes all tries one request."""

    def __init__(self, configuration: HttpConfiguration, request: httpx2.Request) -> None:
        super().__init__(configuration, request)
        self.key = request.headers.get("idempotency-key") or uuid.uuid4().hex

    def is_refused(self, response: httpx2.Response) -> bool:
        return response.status_code in _RETRIED_STATUSES

    def delay_s(self, error: Exception) -> float:
        """Return the seconds until the next call. Raises `error`, or ReadError, where no further call is made."""
        failure = call_failure(error)
        if failure is None:
            raise error
        try:
            return self._next_delay(failure)
        except PagestreamError as last:
            if isinstance(error, httpx2.TransportError):
                raise error from last
            raise httpx2.ReadError(str(last)) from last

    @abstractmethod
    def _next_delay(self, failure: Failure) -> float:
        """Return the seconds until the next call. Raises PagestreamError where there is none."""


class WholeCall(_RepeatedCall):
    """A generation whose answer is one body. All its tries together have the time limit of the request's answer."""

    def __init__(
        self,
        configuration: HttpConfiguration,
        request: httpx2.Request,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(configuration, request)
        self._retry = configuration.retry_state()
        self._clock = clock
        limit_s = request.extensions.get("timeout", {}).get("read")
        self._ends = math.inf if limit_s is None else clock() + limit_s

    def delay_s(self, error: Exception) -> float:
        """Return the seconds until the next call. Raises `error`, ReadError or ReadTimeout, where there is none."""
        if isinstance(error, httpx2.TimeoutException) and self._clock() >= self._ends:
            raise error
        delay_s = super().delay_s(error)
        if self._clock() + delay_s < self._ends:
            return delay_s
        if isinstance(error, httpx2.TransportError):
            raise httpx2.ReadTimeout(f"no answer within the request's limit; the last error: {error}") from error
        raise httpx2.ReadError(str(error)) from error  # a refusal, which is the answer

    def _next_delay(self, failure: Failure) -> float:
        return self._retry.next_delay(failure, self.target)

    def _own_headers(self) -> dict[str, str]:
        return {"idempotency-key": self.key}

    def _extensions(self) -> dict[str, Any]:
        extensions = super()._extensions()
        if self._ends < math.inf:
            left_s = max(self._ends - self._clock(), 0.001)
            limits = extensions["timeout"].items()
            extensions["timeout"] = {name: left_s if given is None else min(given, left_s) for name, given in limits}
        return extensions


class StreamedCall(_RepeatedCall):
    """A generation whose answer is a stream, which is resumed where it breaks."""

    def __init__(self, configuration: HttpConfiguration, request: httpx2.Request, body: dict[str, Any]) -> None:
        super().__init__(configuration, request)
        self._decoder = SseDecoder()
        # A resumed stream has ids always; its reader gets them where the first one has them.
        self._with_ids = request.headers.get("x-stream-ids", "").lower() == "true"
        self._is_stream = True
        self.state: HttpStreamState = configuration.stream_state(HttpRequest(request.url.path, body, self.key))

    @property
    def is_accepted(self) -> bool:
        return self.state.is_accepted

    def next_request(self) -> httpx2.Request:
        call, self.target = self.state.next_call(), self._configuration.endpoints.current
        self._is_stream = call.is_stream
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

    def is_refused(self, response: httpx2.Response) -> bool:
        # Once the request is accepted, each refusal is this stream's to handle.
        return super().is_refused(response) or (self.is_accepted and response.status_code != 200)

    def answered(self, response: httpx2.Response) -> bool:
        if response.status_code == 200:
            self.state.opened(response.headers)
        return self._is_stream

    def events(self, data: bytes) -> Iterator[bytes]:
        """Yield the events that are complete with these bytes, encoded again. Raises CallRefused."""
        self.state.note_sign()
        for event in self._decoder.feed(data):
            self.state.read_event(event, self.target)
            yield _encode(event, with_id=self._with_ids)

    def ended_delay_s(self) -> float:
        """Return the seconds until the next call, after one that ended too early. Raises ReadError."""
        try:
            return self.state.ended(self.target)
        except PagestreamError as last:
            raise httpx2.ReadError(str(last)) from last

    def _next_delay(self, failure: Failure) -> float:
        return self.state.failed(failure, self.target)


def headers_of_stream(response: httpx2.Response) -> list[tuple[str, str]]:
    """Return the headers that hold for the whole of a stream over several answers."""
    own = ("content-length", "transfer-encoding", "content-encoding")
    return [(name, value) for name, value in response.headers.items() if name not in own]


def _encode(event: Event, *, with_id: bool) -> bytes:
    data = "".join(f"data: {line}\n" for line in event.data.split("\n"))
    return (f"id: {event.id}\n" if with_id and event.id else "").encode() + f"{data}\n".encode()
