"""An answer as a stream of text that survives its connections.

The request carries an Idempotency-Key, so that sending it again joins the generation that the first try began; once
events have come, the stream is taken up after the last one (`Last-Event-ID`), at any gateway.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from pagestream_cli.client.endpoint import Endpoint
from pagestream_cli.client.sse import Event, SseDecoder
from pagestream_cli.errors import RequestRejectedError, StreamLostError

DONE = "[DONE]"
RETRIED_STATUS = (429, 502, 503, 504)
"""Answers that say "later", not "no"."""
RETRIED_CODES = ("unavailable", "gateway_stopping")
"""The same as an error inside a stream: Redis is away, or this gateway is about to end."""


@dataclass(frozen=True)
class Reconnection:
    """How long a broken stream is taken up again."""

    limit_s: float = 130.0
    """Without any sign: longer than gateways themselves wait for a Redis that is away."""
    healthy_s: float = 10.0
    """A comment is a sign of a gateway that serves, and whose request waits, on a connection that has stood so long."""
    first_contact_s: float = 5.0
    """The same before any server has answered: there it is more likely that none runs."""
    first_delay_s: float = 0.2
    max_delay_s: float = 2.0
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 35.0
    """Between two signs: while a request waits, its gateway sends a comment every 15 s. One that is silent may be
    dead, and without a reader the request is cancelled 40 s after that."""


@dataclass(frozen=True)
class Delta:
    """What one event adds."""

    request_id: str
    text: str
    choice: int = 0
    finish_reason: str | None = None
    usage: Mapping[str, int] | None = None


@dataclass
class _Progress:
    """How far a stream has come."""

    request_id: str = ""
    last_event_id: str = ""
    moved: float = 0.0
    """When it last advanced, on the monotonic clock."""
    tries: int = 0
    """Connections that brought nothing, in a row."""
    answered: bool = False
    """Whether a server has said anything at all."""


async def stream_answer(
    endpoint: Endpoint, path: str, body: Mapping[str, Any], policy: Reconnection | None = None
) -> AsyncIterator[Delta]:
    """Ask for an answer and yield it as it comes, each piece once.

    Args:
        endpoint: the gateways; the first is asked first.
        path: `/v1/completions` or `/v1/chat/completions`.
        body: the request; `stream` is set here.
        policy: limits of the reconnection.

    Raises:
        RequestRejectedError: the server refuses the request, or the answer ends with an error.
        StreamLostError: no sign came for `policy.limit_s`.
    """
    stream = _AnswerStream(endpoint, path, {**body, "stream": True}, policy or Reconnection())
    async for event in stream.events():
        yield _parse(event, stream.request_id)


async def cancel(endpoint: Endpoint, request_id: str) -> None:
    """Tell the server that nobody wants the answer any more.

    A server that is away is left alone: the request's grace ends it.
    """
    async with httpx.AsyncClient(headers=endpoint.headers, timeout=2.0) as http:
        try:
            await http.delete(f"{endpoint.urls[0]}/v1/requests/{request_id}")
        except httpx.TransportError:
            return


class _AnswerStream:
    def __init__(self, endpoint: Endpoint, path: str, body: Mapping[str, Any], policy: Reconnection) -> None:
        self._endpoint = endpoint
        self._path = path
        self._body = body
        self._policy = policy
        self._key = uuid.uuid4().hex
        self._progress = _Progress(moved=time.monotonic())

    @property
    def request_id(self) -> str:
        return self._progress.request_id

    async def events(self) -> AsyncIterator[Event]:
        policy, progress = self._policy, self._progress
        timeout = httpx.Timeout(policy.read_timeout_s, connect=policy.connect_timeout_s)
        encrypted = any(url.startswith("https") for url in self._endpoint.urls)  # certificates take 80 ms to load
        async with httpx.AsyncClient(headers=self._endpoint.headers, timeout=timeout, verify=encrypted) as http:
            while True:
                try:
                    async for event in self._connection(http):
                        if event.data == DONE:
                            return
                        _raise_if_later(event)
                        progress.tries, progress.moved = 0, time.monotonic()
                        progress.last_event_id = event.id or progress.last_event_id
                        yield event
                    reason = "the connection ended before the answer did"
                except httpx.TransportError as error:
                    reason = str(error) or type(error).__name__
                except _ComeBackError as later:
                    reason = str(later)
                await self._wait(reason)

    async def _connection(self, http: httpx.AsyncClient) -> AsyncIterator[Event]:
        decoder, begun = SseDecoder(), time.monotonic()
        async with http.stream(**self._request()) as response:
            self._progress.answered = True
            if response.status_code != httpx.codes.OK:
                raise _refusal(response.status_code, await response.aread())
            self._progress.request_id = response.headers.get("x-request-id", "") or self._progress.request_id
            async for data in response.aiter_raw():
                events = list(decoder.feed(data))
                if not events and time.monotonic() - begun >= self._policy.healthy_s:
                    self._progress.moved = time.monotonic()
                for event in events:
                    yield event

    def _request(self) -> dict[str, Any]:
        base = self._endpoint.urls[self._progress.tries % len(self._endpoint.urls)]
        if not self._progress.request_id:
            return {
                "method": "POST",
                "url": base + self._path,
                "json": self._body,
                "headers": {"Idempotency-Key": self._key},
            }
        last = {"Last-Event-ID": self._progress.last_event_id} if self._progress.last_event_id else {}
        return {"method": "GET", "url": f"{base}/v1/requests/{self._progress.request_id}/events", "headers": last}

    async def _wait(self, reason: str) -> None:
        policy, progress = self._policy, self._progress
        delay_s = min(policy.first_delay_s * 2 ** min(progress.tries, 16), policy.max_delay_s)
        progress.tries += 1
        limit_s = policy.limit_s if progress.answered else policy.first_contact_s
        if time.monotonic() + delay_s - progress.moved > limit_s:
            where = ", ".join(self._endpoint.urls)
            request = f"/v1/requests/{progress.request_id}/events"
            hint = (
                f"the answer may still be there: GET {request}" if progress.request_id else "does a server run there?"
            )
            raise StreamLostError(f"{where} did not answer for {limit_s:.0f} s ({reason})", hint=hint)
        await asyncio.sleep(delay_s)


class _ComeBackError(Exception):
    """The server asks to come back."""


def _raise_if_later(event: Event) -> None:
    if (
        '"error"' in event.data
        and (error := json.loads(event.data).get("error"))
        and error.get("code") in RETRIED_CODES
    ):
        raise _ComeBackError(str(error.get("message", "")))


def _refusal(status: int, content: bytes) -> Exception:
    message = error_message(content)
    if status in RETRIED_STATUS:
        return _ComeBackError(f"{status}: {message}")
    return RequestRejectedError(status, message)


def error_message(content: bytes) -> str:
    """What an OpenAI error body says; the body itself where it is none."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:500].decode(errors="replace")


def _parse(event: Event, request_id: str) -> Delta:
    body = json.loads(event.data)
    if error := body.get("error"):
        raise RequestRejectedError(httpx.codes.OK, f"{error.get('code')}: {error.get('message')}")
    choice = (body.get("choices") or [{}])[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return Delta(request_id, text, choice.get("index", 0), choice.get("finish_reason"), body.get("usage"))
