"""An HTTP server with a gateway's streaming protocol, which cuts connections where a test asks for it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from support.processes.waiting import LIMIT_S

REQUEST_ID = "2a97516c-0000-0123456789abcdef0123456789abcdef"
HEAD = "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n{more}"

_SIGN_S = 0.05


@dataclass(frozen=True)
class Call:
    """A request that was received."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class ScriptedGateway:
    """Answers with `tokens`, one event each. Use as `async with`."""

    tokens: list[str] = field(default_factory=lambda: ["Once", " upon", " a", " time"])
    breaks: list[int | float | str | None] = field(default_factory=list)
    """How each connection in turn ends: cut after a number of events (int), cut after seconds of empty lines (float),
    with an error event of this code (str), or at its end (None), as connections beyond the list do."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Status and message of the answers to the first requests."""
    is_lost: bool = False
    """Whether the request is unknown, until it is accepted again."""
    models: list[str] = field(default_factory=lambda: ["demo"])
    unserved: list[str] = field(default_factory=list)
    """Those of them that no engine runs."""
    adapters: list[str] = field(default_factory=list)
    """Further ones, of the first model."""
    calls: list[Call] = field(default_factory=list)
    url: str = ""
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            call = await _read_call(reader)
            self.calls.append(call)
            if call.path == "/v1/models":
                data: list[dict[str, Any]] = [
                    {"id": name, "max_model_len": 128, "engines": int(name not in self.unserved), "parent": None}
                    for name in self.models
                ]
                data += [{**data[0], "id": name, "parent": data[0]["id"]} for name in self.adapters]
                _write_json(writer, "200 OK", {"data": data})
            elif call.method == "PUT":
                self.is_lost = False
                _write_json(writer, "200 OK", {})
            elif call.method == "GET" and self.is_lost:
                error = {"message": "there is no such request", "code": "request_not_found"}
                _write_json(writer, "404 Not Found", {"error": error})
            elif call.method == "DELETE":
                _write_json(writer, "200 OK", {})
            elif self.refusals:
                status, message = self.refusals.pop(0)
                _write_json(writer, f"{status} Refused", {"error": {"message": message, "code": "refused"}})
            else:
                await self._stream(call, writer)
            await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    async def _stream(self, call: Call, writer: asyncio.StreamWriter) -> None:
        ending = self.breaks.pop(0) if self.breaks else None
        more = f"Transfer-Encoding: chunked\r\nX-Request-Id: {REQUEST_ID}\r\nX-Request-Seed: 7\r\n\r\n"
        writer.write(HEAD.format(status="200 OK", kind="text/event-stream", more=more).encode())
        if isinstance(ending, str):
            _chunk(writer, _event(call, _start(call), {"error": {"message": "later", "code": ending}}))
            return
        if isinstance(ending, float):
            for _ in range(max(1, round(ending / _SIGN_S))):
                await asyncio.sleep(_SIGN_S)
                _chunk(writer, "\n\n")
            ending = 0
        events = [_event(call, i + 1, self._body(call, i)) for i in range(_start(call), len(self.tokens) + 2)]
        for event in events if ending is None else events[:ending]:
            _chunk(writer, event)
            await writer.drain()
        if ending is not None:
            writer.transport.abort()
            return
        _chunk(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _body(self, call: Call, index: int) -> dict[str, Any]:
        if index == len(self.tokens) + 1:
            return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(self.tokens)}}
        text = self.tokens[index] if index < len(self.tokens) else ""
        finish = "stop" if index == len(self.tokens) else None
        said = {"delta": {"content": text}} if "chat" in call.path else {"text": text}
        running = {"prompt_tokens": 3, "completion_tokens": index + 1}  # some servers count in each chunk
        return {"choices": [{"index": 0, **said, "finish_reason": finish}], "usage": running}


def _start(call: Call) -> int:
    last = call.headers.get("last-event-id")
    return int(last.split("/")[1]) if last else 0


def _event(call: Call, next_index: int, body: dict[str, Any]) -> str:
    position = f"{REQUEST_ID}/{next_index}/d{next_index}"
    head = f"id: {position}\n" if call.method == "GET" else ""
    return f"{head}data: {json.dumps({**body, 'stream_position': position})}\n\n"


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    data = text.encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _write_json(writer: asyncio.StreamWriter, status: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(
        HEAD.format(status=status, kind="application/json", more=f"Content-Length: {len(data)}\r\n\r\n").encode()
    )
    writer.write(data)


async def _read_call(reader: asyncio.StreamReader) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:]) if name}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    return Call(method, path, headers, json.loads(content) if content else None)


@contextmanager
def served(gateway: ScriptedGateway) -> Iterator[ScriptedGateway]:
    """Runs a gateway beside the code under test, which has an event loop of its own."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    up = threading.Event()

    async def serve() -> None:
        async with gateway:
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert up.wait(LIMIT_S)
        yield gateway
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(LIMIT_S)
        loop.close()
