"""As much of HTTP/2 and gRPC's framing as a client needs that may send anything.

A client library would refuse to send most of this. Header blocks are literals without compression (RFC 7541, section
6.2.2), in both directions: the table's size is set to 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_HEAD_BYTES = 9
_WINDOW = 2**24
Fields = Sequence[tuple[bytes, bytes]]


class Frame(NamedTuple):
    """A frame that came."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame's bytes."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + (stream & 0xFFFFFFFF).to_bytes(4) + payload


def opening() -> bytes:
    """Return what a client begins with: no header table, wide windows."""
    settings = ((1, 0), (2, 0), (4, _WINDOW))
    payload = b"".join(number.to_bytes(2) + value.to_bytes(4) for number, value in settings)
    return PREFACE + frame(SETTINGS, 0, 0, payload) + frame(WINDOW_UPDATE, 0, 0, _WINDOW.to_bytes(4))


def header_block(fields: Fields) -> bytes:
    """Return a header block."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def call_fields(method: str, *more: tuple[bytes, bytes]) -> Fields:
    """Return the header of a call."""
    return (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode("utf-8", "surrogateescape")),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    )


def message(data: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """Return a gRPC message with its prefix."""
    return bytes((flag,)) + (len(data) if length is None else length).to_bytes(4) + data


def read_frames(data: bytearray) -> Iterator[Frame]:
    """Yield the complete frames, and remove them."""
    while len(data) >= _HEAD_BYTES:
        end = _HEAD_BYTES + int.from_bytes(data[:3])
        if len(data) < end:
            return
        yield Frame(data[3], data[4], int.from_bytes(data[5:9]) & 0x7FFFFFFF, bytes(data[_HEAD_BYTES:end]))
        del data[:end]


def field_of(block: bytes, name: bytes) -> bytes | None:
    """Return a field's value from a header block without compression."""
    place = block.find(_text(name))
    if place < 0:
        return None
    start = place + len(_text(name))
    return block[start + 1 : start + 1 + (block[start] & 0x7F)]


def _text(text: bytes) -> bytes:
    """Return a string literal (RFC 7541, section 5.2) without Huffman's code."""
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    head, size = bytearray((127,)), size - 127
    while size >= 128:
        head.append(size % 128 | 128)
        size //= 128
    head.append(size)
    return bytes(head) + text
