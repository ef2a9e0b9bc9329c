"""Frames of WebSocket as a client spells them, in any pieces."""

import pytest
from pagestream_gateway.streams.websocket import BrokenFrame, FrameReader, Part, accept_key, frame
from wsproto.frame_protocol import Opcode

MASK = bytes((1, 2, 3, 250))


def sent(opcode: int, payload: bytes, *, fin: int = 0x80) -> bytes:
    """Return a frame as a client sends it."""
    head = frame(Opcode.TEXT, payload)[: -len(payload) or None]
    masked = bytes(byte ^ MASK[place % 4] for place, byte in enumerate(payload))
    return bytes((fin | opcode, head[1] | 0x80)) + head[2:] + MASK + masked


def texts(parts: list[Part]) -> list[bytes]:
    """Return the messages that parts make up."""
    messages, message = [], b""
    for part in parts:
        if part.opcode == Opcode.TEXT:
            message += part.payload
            if part.is_last:
                messages.append(message)
                message = b""
    return messages


@pytest.mark.parametrize("piece", [1, 3, 1000, 10**6])
def test_messages_are_whole_however_they_are_cut(piece: int) -> None:
    long = bytes(range(256)) * 300
    stream = sent(1, b"") + sent(1, b"one", fin=0) + sent(9, b"ping") + sent(0, b"", fin=0) + sent(0, b" two")
    stream += sent(1, long[:300]) + sent(1, long) + sent(8, b"\x03\xe8")
    reader, parts = FrameReader(), list[Part]()
    for place in range(0, len(stream), piece):
        parts += reader.feed(stream[place : place + piece])
    assert texts(parts) == [b"", b"one two", long[:300], long]
    assert [(part.opcode, part.payload) for part in parts if part.opcode >= Opcode.CLOSE] == [
        (Opcode.PING, b"ping"),
        (Opcode.CLOSE, b"\x03\xe8"),
    ]


@pytest.mark.parametrize(
    "broken",
    [
        b"\x81\x01x",  # no mask
        sent(1 | 0x40, b"x"),  # a reserved bit
        sent(3, b"x"),  # an opcode that is not there
        sent(0, b"x"),  # a continuation of nothing
        sent(1, b"x", fin=0) + sent(1, b"x"),  # a message within another
        sent(9, b"x", fin=0),  # a control frame in parts
        sent(9, b"x" * 126),  # a control frame that is too long
        b"\x81\xff" + b"\xff" * 8 + MASK,  # a size beyond 63 bits
        sent(9, b"") * 20_000,  # pings without end
        sent(1, b"", fin=0) + sent(0, b"", fin=0) * 20_000,  # a message of empty parts
    ],
)
def test_what_no_client_may_send_is_refused(broken: bytes) -> None:
    with pytest.raises(BrokenFrame):
        list(FrameReader().feed(broken))


def test_the_handshake_is_that_of_the_rfc() -> None:
    headers = {"upgrade": "WebSocket", "sec-websocket-version": "13", "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}
    assert accept_key(headers) == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    for wrong in ({"upgrade": "h2c"}, {"sec-websocket-version": "8"}, {"sec-websocket-key": "x"}):
        assert accept_key({**headers, **wrong}) is None
