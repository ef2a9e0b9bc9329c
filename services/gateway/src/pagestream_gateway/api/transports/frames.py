"""WebSocket's wire format (RFC 6455): the handshake, and frames without extensions."""

import base64
import binascii
import enum
import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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
