"""Streams over WebSocket (RFC 6455): a call of the HTTP API whose body and answer travel as messages."""

import asyncio
import base64
import binascii
import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Message, Scope
from wsproto.frame_protocol import CloseReason, Frame, FrameDecoder, Opcode, ParseFailed
from wsproto.utilities import generate_accept_token

from pagestream_gateway.streams.events import NDJSON, LineFraming

_VERSION = "13"
_MAX_CONTROL_BYTES = 125
_SMALL_FRAMES, _FRAME_BYTES = 1024, 16
"""Of what comes at once: so many frames, and one for so many bytes. A client that sends more only costs time."""
_FIN = 0x80


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
    return generate_accept_token(key.encode()).decode()


def frame(opcode: Opcode, payload: bytes, *, is_last: bool = True) -> bytes:
    """Return a frame as a server sends it: without a mask.

    wsproto takes text as `str` alone; an answer is JSON in bytes, in pieces that may cut a character.
    """
    first, size = opcode | (_FIN if is_last else 0), len(payload)
    if size <= _MAX_CONTROL_BYTES:
        return bytes((first, size)) + payload
    if size < 1 << 16:
        return bytes((first, 126)) + size.to_bytes(2) + payload
    return bytes((first, 127)) + size.to_bytes(8) + payload


class FrameReader:
    """Parses what a client sends. It holds no message: at most a frame's header, or a control frame."""

    def __init__(self) -> None:
        self._frames = FrameDecoder(client=False)
        self._message: Opcode | None = None
        """Kind of the message that has begun."""
        self._in_frame = False

    def feed(self, data: bytes) -> Iterator[Part]:
        """Yield the parts that `data` has or completes. Raises BrokenFrame."""
        self._frames.receive_bytes(data)
        num_left = _SMALL_FRAMES + len(data) // _FRAME_BYTES
        while (found := self._next_frame()) is not None:
            num_left -= found.frame_finished
            if num_left < 0:
                raise BrokenFrame
            payload = cast(bytes, found.payload)
            if found.opcode.iscontrol():
                yield Part(found.opcode, payload, is_last=True)
            else:
                yield self._part(found, payload)

    def _next_frame(self) -> Frame | None:
        """Return a control frame, or what has come of a data frame; None where more must come."""
        try:
            return self._frames.process_buffer()
        except ParseFailed as error:
            raise BrokenFrame from error

    def _part(self, found: Frame, payload: bytes) -> Part:
        if not self._in_frame and (found.opcode is Opcode.CONTINUATION) == (self._message is None):
            raise BrokenFrame
        opcode = found.opcode if self._message is None else self._message
        self._in_frame = not found.frame_finished
        is_last = found.frame_finished and found.message_finished
        self._message = None if is_last else opcode
        return Part(opcode, payload, is_last=is_last)


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
        self._close_code: int = CloseReason.NORMAL_CLOSURE
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
                    self._receive_part(opcode, payload, is_last=is_last)
        except BrokenFrame:
            self.leave(CloseReason.PROTOCOL_ERROR)
        if len(self._unread) > _UNREAD_BYTES:
            self._flow.pause_reading()

    def leave(self, code: int = CloseReason.NORMAL_CLOSURE) -> None:
        """Note that nothing more comes; the call ends as that of a client which left. `code` answers it."""
        if not self._has_left.is_set():
            self._close_code = code
            self._has_left.set()
            self._has_come.set()

    def _receive_part(self, opcode: Opcode, payload: bytes, *, is_last: bool) -> None:
        if opcode == Opcode.BINARY:
            self.leave(CloseReason.UNSUPPORTED_DATA)
        elif self._is_body_complete:  # one call a connection
            self.leave(CloseReason.POLICY_VIOLATION)
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
            self.leave(CloseReason.SERVICE_RESTART)
            raise
        except Exception:
            self.leave(CloseReason.INTERNAL_ERROR)
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
            self.leave(CloseReason.POLICY_VIOLATION)

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
            self._send_start(message)
        elif self._is_stream:
            self._send_lines(message.get("body", b""))
        else:
            self._send_piece(message.get("body", b""), is_last=not message.get("more_body", False))

    def _send_start(self, message: Message) -> None:
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
                self._close_code = CloseReason.SERVICE_RESTART if is_stopping else _STREAM_FAILED

    def _send_piece(self, body: bytes, *, is_last: bool) -> None:
        """Send a part of one message."""
        self._transport.write(frame(self._piece, body, is_last=is_last))
        self._piece = Opcode.TEXT if is_last else Opcode.CONTINUATION

    async def _close(self) -> None:
        if self._piece is Opcode.CONTINUATION and self._close_code == CloseReason.NORMAL_CLOSURE:
            self._close_code = _STREAM_FAILED  # within a message
        if not self._transport.is_closing():
            self._transport.write(frame(Opcode.CLOSE, self._close_code.to_bytes(2)))
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
