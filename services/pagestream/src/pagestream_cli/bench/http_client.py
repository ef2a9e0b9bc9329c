"""Bench requests over HTTP/1.1 on bare asyncio.

The load generator shares its cores with the servers that it measures, and needs half the CPU time of an HTTP library
for each event (docs/design/releases.md). Events are decoded by the code of `pagestream_client`; nothing is resumed or
retried, since a broken stream is a result.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from pagestream_client.sse import Event, SseDecoder

from pagestream_cli.bench.load import AnswerError, BenchRequest, ResponseMeasurement
from pagestream_cli.client.endpoint import Endpoint
from pagestream_cli.client.gateways import error_message, next_index_of

MAX_HEAD_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 20
"""Most bytes of an error answer that are kept."""
READ_BYTES = 1 << 16


class HttpClient:
    """Send completions to the gateways in turn."""

    def __init__(self, endpoint: Endpoint, model: str, temperature: float) -> None:
        self._endpoint = endpoint
        self._model = model
        self._temperature = temperature
        self._next = 0

    async def close(self) -> None:
        """Nothing is kept between requests."""

    async def ask(self, request: BenchRequest, measurement: ResponseMeasurement) -> None:
        """Send a request and record its answer in the measurement.

        Raises:
            AnswerError: the answer is an error, or not complete.
            OSError: the connection failed.
        """
        url = urlsplit(self._endpoint.urls[self._next % len(self._endpoint.urls)])
        self._next += 1
        port = url.port or (443 if url.scheme == "https" else 80)
        tls = self._endpoint.tls() if url.scheme == "https" else None
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=tls, limit=MAX_HEAD_BYTES)
        try:
            writer.write(self._request_bytes(request, url.netloc))
            decoder = SseDecoder()
            async for data in _body(reader):
                for event in decoder.feed(data):
                    note_event(event, measurement)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise AnswerError("connection", f"the answer broke off: {error}") from error
        finally:
            writer.close()
        if not measurement.done:
            raise AnswerError("incomplete", "the stream ended without [DONE]")

    def _request_bytes(self, request: BenchRequest, host: str) -> bytes:
        content = json.dumps(self._body(request)).encode()
        headers = {
            "Host": host,
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            "Connection": "close",
            **self._endpoint.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + content

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": self._temperature,
            "ignore_eos": request.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def _body(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status_line, *lines = head.split("\r\n")
    status = int(status_line.split(" ", 2)[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    chunked = headers.get("transfer-encoding", "").lower() == "chunked"
    pieces = _chunks(reader) if chunked else _plain(reader, headers.get("content-length"))
    if status == 200:
        async for piece in pieces:
            yield piece
        return
    content = b""
    async for piece in pieces:
        content = (content + piece)[:MAX_BODY_BYTES]
    raise AnswerError(f"http {status}", error_message(content))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _plain(reader: asyncio.StreamReader, length: str | None) -> AsyncIterator[bytes]:
    if length is not None:
        yield await reader.readexactly(int(length))
        return
    while data := await reader.read(READ_BYTES):
        yield data


def note_event(event: Event, measurement: ResponseMeasurement) -> None:
    """Record an event in the measurement.

    A server that numbers its events (`stream_position`: `<request>/<next index>/<digest>`) may put several tokens into
    one event, so the numbers of tokens are taken from the usage.

    Raises:
        AnswerError: the event is an error.
        ValueError: the event is not JSON.
    """
    if event.data == "[DONE]":
        measurement.done = True
        return
    body = json.loads(event.data)
    if error := body.get("error"):
        raise AnswerError("stream error", str(error.get("message", error)) if isinstance(error, dict) else str(error))
    if usage := body.get("usage"):
        measurement.output_tokens = usage["completion_tokens"]
        measurement.input_tokens = usage["prompt_tokens"]
    if next_index_of(event, body) == 0:  # the opening, before any token
        return
    for choice in body.get("choices") or ():
        if choice.get("finish_reason") == "error":
            raise AnswerError("stream error", "finish_reason is error")
        if choice.get("text") or choice.get("finish_reason") is None:
            measurement.times_s.append(time.perf_counter() - measurement.began_s)
