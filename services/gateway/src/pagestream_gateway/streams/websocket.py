"""Streams over WebSocket (RFC 6455): a call of the HTTP API whose body and answer travel as messages."""

import asyncio
import base64
import binascii
import contextlib
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Message, Scope

from pagestream_gateway.streams.events import NDJSON, LineFraming

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_VERSION = "13"
_MAX_CONTROL_BYTES = 125
_SMALL_FRAMES, _FRAME_BYTES = 1024, 16
"""Of what comes at once: so many frames, and one for so many bytes. A client that sends more only costs time."""
_FIN, _MASKED = 0x80, 0x80


class Opcode(enum.IntEnum):
    """Kinds of frames."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class CloseCode(enum.IntEnum):
    """Codes with which a connection is closed."""

    COMPLETE = 1000
    PROTOCOL_ERROR = 1002
    NOT_TEXT = 1003
    POLICY = 1008
    DEFECT = 1011
    RESTART = 1012


class BrokenFrame(Exception):  # noqa: N818 - says what is wrong
    """The peer sent what no WebSocket client may send."""


class Part(NamedTuple):
    """A part of a message, as much of it as has come, or a whole control frame."""

    opcode: Opcode
    """TEXT or BINARY for every part of a message."""
    payload: bytes
    is_last: bool
    """Whether it ends its message."""


def accept_key(headers: Mapping[str, str]) -> str | None:
    """Return the Sec-WebSocket-Accept of a GET with these headers; None where they are no handshake of version 13."""
    if headers.get("upgrade", "").lower() != "websocket" or headers.get("sec-websocket-version") != _VERSION:
        return None
    key = headers.get("sec-websocket-key", "")
    try:
        if len(base64.b64decode(key, validate=True)) != 16:
            return None
    except (binascii.Error, ValueError):
        return None
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID, usedforsecurity=False).digest()).decode()


def frame(opcode: Opcode, payload: bytes, *, is_last: bool = True) -> bytes:
    """Return a frame as a server sends it: without a mask."""
    first, size = opcode | (_FIN if is_last else 0), len(payload)
    if size <= _MAX_CONTROL_BYTES:
        return bytes((first, size)) + payload
    if size < 1 << 16:
        return bytes((first, 126)) + size.to_bytes(2) + payload
    return bytes((first, 127)) + size.to_bytes(8) + payload


def close_frame(code: int) -> bytes:
    """Return a frame that closes the connection."""
    return frame(Opcode.CLOSE, code.to_bytes(2))


class FrameReader:
    """Parses what a client sends. It holds no message: at most a frame's header, or a control frame."""

    def __init__(self) -> None:
        self._unparsed = bytearray()
        self._message: Opcode | None = None
        """Kind of the message that has begun."""
        self._mask = b""
        self._left = 0  # bytes of the current data frame
        self._in_frame = False
        self._is_final = False

    def feed(self, data: bytes) -> Iterator[Part]:
        """Yield the parts that `data` has or completes. Raises BrokenFrame."""
        self._unparsed += data
        num_left = _SMALL_FRAMES + len(data) // _FRAME_BYTES
        while (part := self._payload() if self._in_frame else self._head()) is not None:
            num_left -= part is _AGAIN or part.opcode >= Opcode.CLOSE
            if num_left < 0:
                raise BrokenFrame
            if part is not _AGAIN:
                yield part

    def _head(self) -> Part | None:
        """Parse a frame's header, and a control frame as a whole; None where more must come."""
        data = self._unparsed
        if len(data) < 2:
            return None
        size, start = data[1] & 0x7F, 2
        if data[0] & 0x70 or not data[1] & _MASKED:
            raise BrokenFrame
        is_final, opcode = bool(data[0] & _FIN), _opcode(data[0] & 0x0F)
        if opcode >= Opcode.CLOSE and (size > _MAX_CONTROL_BYTES or not is_final):
            raise BrokenFrame
        if size > _MAX_CONTROL_BYTES:
            start = 4 if size == 126 else 10
            if len(data) < start:
                return None
            size = int.from_bytes(data[2:start])
            if size >> 63:
                raise BrokenFrame
        if len(data) < start + 4 or (opcode >= Opcode.CLOSE and len(data) < start + 4 + size):
            return None
        self._mask = bytes(data[start : start + 4])
        del data[: start + 4]
        if opcode >= Opcode.CLOSE:
            payload = _unmasked(bytes(data[:size]), self._mask)
            del data[:size]
            return Part(opcode, payload, is_last=True)
        if (opcode == Opcode.CONTINUATION) == (self._message is None):
            raise BrokenFrame
        self._message = opcode if self._message is None else self._message
        self._left, self._is_final, self._in_frame = size, is_final, True
        return _AGAIN

    def _payload(self) -> Part | None:
        """Take what is there of a data frame; None where more must come."""
        if (self._left and not self._unparsed) or self._message is None:
            return None
        payload = _unmasked(bytes(self._unparsed[: self._left]), self._mask)
        del self._unparsed[: len(payload)]
        turn = len(payload) % 4
        self._mask = self._mask[turn:] + self._mask[:turn]
        self._left -= len(payload)
        self._in_frame = bool(self._left)
        part = Part(self._message, payload, is_last=self._is_final and not self._in_frame)
        if part.is_last:
            self._message = None
        return part


_AGAIN = Part(Opcode.CONTINUATION, b"", is_last=False)
"""A header was parsed; its payload comes next."""


def _opcode(number: int) -> Opcode:
    try:
        return Opcode(number)
    except ValueError as error:
        raise BrokenFrame from error


def _unmasked(data: bytes, mask: bytes) -> bytes:
    size = len(data)
    masks = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data) ^ int.from_bytes(masks)).to_bytes(size)


_POSTED = ("/v1/completions", "/v1/chat/completions")
_KEY_PREFIX = "openai-insecure-api-key."
_UNREAD_BYTES = 64 * 1024  # of a first message, before the client has to wait
_LINGER_S = 2.0  # until the client has answered the close
_LINGER_BYTES = 1024 * 1024
_STREAM_FAILED = 4500
_ERRORS = (b'{"error"', b'{"type":"error"')
_HTTP_CODES = 4000  # and the status


class Flow(Protocol):
    """Back pressure of a connection, as uvicorn has it."""

    async def drain(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class WebSocket:
    """One connection after the handshake, and the call that it carries. Call `run` once, `feed` for what comes."""

    def __init__(
        self, scope: Scope, transport: asyncio.Transport, flow: Flow, *, body_timeout_s: float, write_bytes: int
    ) -> None:
        """`scope`: of the handshake. `write_bytes`: what may wait for the client before a ping is left unanswered."""
        self._scope, self._transport, self._flow = scope, transport, flow
        self._body_timeout_s, self._write_bytes = body_timeout_s, write_bytes
        self._reader = FrameReader()
        self._unread = bytearray()
        self._is_body_complete = self._is_body_read = scope["path"] not in _POSTED
        self._has_come = asyncio.Event()
        """Set while there is something for the call: a part of its body, or the client's end."""
        self._has_left = asyncio.Event()
        self._close_code: int = CloseCode.COMPLETE
        self._is_stream = False
        self._piece = Opcode.TEXT
        """What the next part of an answer in one message is sent as."""
        self._dropped_bytes = 0

    # -- what the connection calls

    def feed(self, data: bytes) -> None:
        """Take what the client sent."""
        if self._has_left.is_set():
            self._dropped_bytes += len(data)
            if self._dropped_bytes > _LINGER_BYTES:
                self._transport.abort()
            return
        try:
            for opcode, payload, is_last in self._reader.feed(data):
                if opcode == Opcode.CLOSE:
                    self.leave()
                    return
                if opcode == Opcode.PING and self._transport.get_write_buffer_size() <= self._write_bytes:
                    self._transport.write(frame(Opcode.PONG, payload))
                elif opcode in (Opcode.TEXT, Opcode.BINARY):
                    self._take(opcode, payload, is_last=is_last)
        except BrokenFrame:
            self.leave(CloseCode.PROTOCOL_ERROR)
        if len(self._unread) > _UNREAD_BYTES:
            self._flow.pause_reading()

    def leave(self, code: int = CloseCode.COMPLETE) -> None:
        """Note that nothing more comes; the call ends as that of a client which left. `code` answers it."""
        if not self._has_left.is_set():
            self._close_code = code
            self._has_left.set()
            self._has_come.set()

    def _take(self, opcode: Opcode, payload: bytes, *, is_last: bool) -> None:
        if opcode == Opcode.BINARY:
            self.leave(CloseCode.NOT_TEXT)
        elif self._is_body_complete:  # one call a connection
            self.leave(CloseCode.POLICY)
        else:
            self._unread += payload
            self._is_body_complete = is_last
            self._has_come.set()

    # -- the call

    async def run(self, app: ASGIApp) -> None:
        """Answer the handshake, make the call, and close the connection."""
        headers = _texts(self._scope)
        reply = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        reply += f"Sec-WebSocket-Accept: {accept_key(headers)}\r\n"
        protocol = next((each for each in _protocols(headers) if not each.startswith(_KEY_PREFIX)), None)
        if protocol is not None:
            reply += f"Sec-WebSocket-Protocol: {protocol}\r\n"
        self._transport.write(reply.encode("latin-1") + b"\r\n")
        timer = asyncio.get_running_loop().call_later(self._body_timeout_s, self._end_of_body)
        try:
            await self._first_message()
            if not self._has_left.is_set():
                await app(self._call(headers), self.receive, self.send)
        except asyncio.CancelledError:
            self.leave(CloseCode.RESTART)
            raise
        except Exception:
            self.leave(CloseCode.DEFECT)
            raise
        finally:
            timer.cancel()
            await self._close()

    async def receive(self) -> Message:
        """Return the next part of the body, or that the client has left."""
        if not self._is_body_read:
            await self._has_come.wait()
            if not self._has_left.is_set():
                body = bytes(self._unread)
                self._unread.clear()
                self._has_come.clear()
                self._flow.resume_reading()
                self._is_body_read = self._is_body_complete
                return {"type": "http.request", "body": body, "more_body": not self._is_body_complete}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _first_message(self) -> None:
        """Wait until the body is complete or has more bytes than are kept, or the client has left.

        The call takes room for a body whose size it does not know: one that is still to come takes none.
        """
        while not (self._is_body_complete or self._has_left.is_set() or len(self._unread) > _UNREAD_BYTES):
            self._has_come.clear()
            await self._has_come.wait()

    def _end_of_body(self) -> None:
        """End a call whose body has not come in time, however many parts of it have."""
        if not self._is_body_complete:
            self.leave(CloseCode.POLICY)

    def _call(self, headers: Mapping[str, str]) -> Scope:
        """Return the HTTP call that the handshake stands for, with the size of a body that has come."""
        call = _call(self._scope, headers)
        if self._scope["path"] in _POSTED and self._is_body_complete:
            call["headers"].append((b"content-length", str(len(self._unread)).encode()))
        return call

    async def send(self, message: Message) -> None:
        """Send a part of the answer, once the client has taken nearly all of what was sent before.

        Where this is cancelled, nothing of the part was sent.
        """
        await self._flow.drain()
        if self._has_left.is_set():
            return
        if message["type"] == "http.response.start":
            self._begin(message)
        elif self._is_stream:
            self._send_lines(message.get("body", b""))
        else:
            self._send_piece(message.get("body", b""), is_last=not message.get("more_body", False))

    def _begin(self, message: Message) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
        self._is_stream = headers.get("content-type") == NDJSON
        status = message["status"]
        if status != 200:
            self._close_code = _HTTP_CODES + status
        shown = {name: value for name, value in headers.items() if name.startswith("x-") or name == "retry-after"}
        self._transport.write(frame(Opcode.TEXT, json.dumps({"status": status, "headers": shown}).encode()))

    def _send_lines(self, body: bytes) -> None:
        if body == LineFraming.keep_alive:
            self._transport.write(frame(Opcode.PING, b""))
            return
        lines = [line for line in body.split(b"\n") if line]
        self._transport.write(b"".join(frame(Opcode.TEXT, line) for line in lines))
        for line in lines:
            if line.startswith(_ERRORS):
                error = json.loads(line)["error"]
                is_stopping = error.get("code", error["type"]) in ("gateway_stopping", "overloaded_error")
                self._close_code = CloseCode.RESTART if is_stopping else _STREAM_FAILED

    def _send_piece(self, body: bytes, *, is_last: bool) -> None:
        """Send a part of one message."""
        self._transport.write(frame(self._piece, body, is_last=is_last))
        self._piece = Opcode.TEXT if is_last else Opcode.CONTINUATION

    async def _close(self) -> None:
        if self._piece is Opcode.CONTINUATION and self._close_code == CloseCode.COMPLETE:
            self._close_code = _STREAM_FAILED  # within a message
        if not self._transport.is_closing():
            self._transport.write(close_frame(self._close_code))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    await self._has_left.wait()
            self._transport.close()


def is_handshake(scope: Scope) -> bool:
    """Return whether a request asks for WebSocket where the API has it; elsewhere Upgrade is ignored, as it may be."""
    path = scope["path"]
    options = b",".join(value for name, value in scope["headers"] if name == b"connection").lower().split(b",")
    asks = scope["http_version"] == "1.1" and b"upgrade" in (option.strip() for option in options)
    if scope["method"] != "GET" or not asks or accept_key(_texts(scope)) is None:
        return False
    return path in _POSTED or (path.startswith("/v1/requests/") and path.endswith("/events"))


def _call(scope: Scope, headers: Mapping[str, str]) -> Scope:
    """Return the HTTP call that a handshake stands for.

    A browser's script can set no headers of a handshake, so a key may be a sub-protocol (OpenAI's form) and the
    position a query parameter.
    """
    dropped = ("accept", "content-type", "content-length", "upgrade", "connection", "last-event-id")
    kept = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in dropped]
    kept.append((b"accept", NDJSON.encode()))
    key = next((each for each in _protocols(headers) if each.startswith(_KEY_PREFIX)), None)
    if key is not None and "authorization" not in headers:
        kept.append((b"authorization", b"Bearer " + key.removeprefix(_KEY_PREFIX).encode("latin-1")))
    query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
    place = headers.get("last-event-id", query.get("last_event_id"))
    if place is not None:
        kept.append((b"last-event-id", place.encode("latin-1", "replace")))
    is_posted = scope["path"] in _POSTED
    if is_posted:
        kept.append((b"content-type", b"application/json"))
    changed: dict[str, Any] = {"method": "POST" if is_posted else "GET", "headers": kept}
    return {**scope, **changed}


def _protocols(headers: Mapping[str, str]) -> list[str]:
    return [each.strip() for each in headers.get("sec-websocket-protocol", "").split(",") if each.strip()]


def _texts(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
