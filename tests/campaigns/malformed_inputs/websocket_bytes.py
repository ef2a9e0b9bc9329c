"""WebSocket handshakes, frames and first messages that are wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from random import Random

from campaigns.malformed_inputs.batches import Batch, Outcome
from campaigns.malformed_inputs.http_calls import status_outcome
from campaigns.malformed_inputs.values import BodyWriter, damaged

_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
_VERSION = b"Sec-WebSocket-Version: 13"
_GOOD = (b"Host: localhost", b"Upgrade: websocket", b"Connection: Upgrade", _KEY, _VERSION)
_HTTP_CODES = 4000  # and the status
_STREAM_FAILED = 4500
_COMPLETE, _DEFECT, _RESTART = 1000, 1011, 1012


class SocketAnswers:
    """The answer to a handshake, and the server's frames until it closes."""

    patience_s = 1.0

    def __init__(self) -> None:
        self._data = bytearray()
        self._is_closed = False

    def feed(self, data: bytes) -> bool:
        """See AnswerReader."""
        self._data += data
        self._is_closed = not data
        return self._is_closed or self._close_code() is not None

    def outcomes(self) -> Counter[Outcome]:
        """See AnswerReader."""
        return Counter([self._outcome()])

    def _outcome(self) -> Outcome:
        status = bytes(self._data[9:12])
        has_status = self._data[:9] == b"HTTP/1.1 " and status.isdigit()
        if has_status and status != b"101":
            return status_outcome(int(status))
        code = self._close_code()
        if code is not None:
            return _close_outcome(code)
        return Outcome.CLOSED if self._is_closed else Outcome.UNANSWERED

    def _close_code(self) -> int | None:
        """Return the code of the server's close frame, once it has come."""
        place = self._data.find(b"\r\n\r\n") + 4
        while 4 <= place <= len(self._data) - 2:
            size, start = self._data[place + 1] & 0x7F, place + 2
            if size >= 126:
                start += 2 if size == 126 else 8
                size = int.from_bytes(self._data[place + 2 : start])
            if self._data[place] & 0x0F == _CLOSE and len(self._data) >= start + 2:
                return int.from_bytes(self._data[start : start + 2])
            place = start + size
        return None


def _close_outcome(code: int) -> Outcome:
    if code in (_DEFECT, _STREAM_FAILED):
        return Outcome.FAILED
    if code >= _HTTP_CODES:
        return status_outcome(code - _HTTP_CODES)
    if code == _RESTART:
        return Outcome.UNAVAILABLE
    return Outcome.ACCEPTED if code == _COMPLETE else Outcome.REFUSED


def _frame(opcode: int, payload: bytes, chance: Random, *, first: int = 0x80, masked: bool = True) -> bytes:
    size, mask = len(payload), chance.randbytes(4)
    flag = 0x80 if masked else 0
    if size < 126:
        head = bytes((first | opcode, flag | size))
    elif size < 1 << 16:
        head = bytes((first | opcode, flag | 126)) + size.to_bytes(2)
    else:
        head = bytes((first | opcode, flag | 127)) + size.to_bytes(8)
    if not masked:
        return head + payload
    stream = mask * (size // 4 + 1)
    return head + mask + bytes(a ^ b for a, b in zip(payload, stream, strict=False))


class SocketInputs:
    """Makes connections with one wrong thing each."""

    def __init__(self, model: str) -> None:
        self._bodies = {
            b"/v1/completions": {"model": model, "prompt": "hello", "max_tokens": 1, "stream": True},
            b"/v1/chat/completions": {
                "model": model,
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 1,
                "stream": True,
            },
        }
        self._makers: tuple[tuple[str, Callable[[Random], bytes]], ...] = (
            ("WebSocket: handshakes", self.handshake),
            ("WebSocket: frames", self.frames),
            ("WebSocket: control frames", self.control),
            ("WebSocket: first messages", self.message),
            ("WebSocket: first messages", self.message),
            ("WebSocket: changed bytes", self.damaged),
        )

    def batch(self, chance: Random) -> Batch:
        """Return one of these inputs."""
        kind, make = chance.choice(self._makers)
        return Batch(kind, make(chance), 1, SocketAnswers())

    def _path(self, chance: Random) -> bytes:
        return chance.choice([*self._bodies, b"/v1/requests/none/events"])

    def _open(self, path: bytes, fields: tuple[bytes, ...] = _GOOD) -> bytes:
        return b"\r\n".join((b"GET " + path + b" HTTP/1.1", *fields)) + b"\r\n\r\n"

    def _body(self, path: bytes) -> bytes:
        return json.dumps(self._bodies.get(path, {})).encode()

    def handshake(self, chance: Random) -> bytes:
        """Return a handshake with a field that is missing or wrong, and a first message."""
        wrong = chance.choice(
            (
                b"Sec-WebSocket-Key: " + chance.choice((b"", b"short", b"=" * 24, b"a" * 5000, b"\xff" * 24)),
                b"Sec-WebSocket-Version: " + chance.choice((b"0", b"8", b"14", b"13, 8", b"x")),
                b"Upgrade: " + chance.choice((b"h2c", b"websocket, h2c", b"WEBSOCKET", b"")),
                b"Connection: " + chance.choice((b"close", b"keep-alive", b"upgrade, close", b",,upgrade")),
                b"Host: example.com",
                b"Sec-WebSocket-Protocol: "
                + chance.choice((b",,,", b"openai-insecure-api-key.", b"a" * 9000, b"\xe9")),
                b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits=99",
                b"Origin: " + chance.choice((b"http://evil.example", b"null", b"://", b"http://localhost")),
                b"Last-Event-ID: " + chance.choice((b"none/0/", b"\xff", b"a/b/c/d")),
                b"Content-Length: " + chance.choice((b"5", b"-1", b"99999999999")),
                b"Transfer-Encoding: chunked",
            )
        )
        name = wrong.partition(b":")[0]
        fields = [each for each in _GOOD if not each.startswith(name + b":")]
        if chance.random() < 0.7:
            fields.insert(chance.randrange(len(fields) + 1), wrong)
        path = self._path(chance)
        return self._open(path, tuple(fields)) + _frame(_TEXT, self._body(path), chance)

    def frames(self, chance: Random) -> bytes:
        """Return a handshake and data frames that are no message."""
        path, body = self._path(chance), self._body(self._path(chance))
        half = len(body) // 2
        sent = chance.choice(
            (
                _frame(_TEXT, body, chance, masked=False),
                _frame(chance.choice((3, 5, 7, 11, 15)), body, chance),
                _frame(_TEXT, body, chance, first=chance.choice((0xC0, 0xA0, 0x90, 0xF0))),
                _frame(_CONTINUATION, body, chance),
                _frame(_BINARY, body, chance),
                _frame(_TEXT, body[:half], chance, first=0) + _frame(_TEXT, body[half:], chance),
                _frame(_TEXT, body[:half], chance, first=0) + _frame(_BINARY, body[half:], chance),
                _frame(_TEXT, body[:half], chance, first=0),
                b"".join(_frame(_CONTINUATION if n else _TEXT, b"", chance, first=0) for n in range(3000)),
                _frame(_TEXT, body[:1], chance, first=0)
                + b"".join(_frame(_CONTINUATION, bytes((each,)), chance, first=0) for each in body[1:])
                + _frame(_CONTINUATION, b"", chance),
                _frame(_TEXT, b"", chance),
                _frame(_TEXT, body, chance) * 3,
                bytes((0x81, 0xFF)) + b"\xff" * 8 + b"mask",
                bytes((0x81, 0xFF)) + (9_000_000).to_bytes(8) + b"mask" + b"a" * 100,
                bytes((0x81, 0xFE, 0, 1)) + b"mask",
                bytes((0x81, 0x80)),
                chance.randbytes(chance.choice((1, 2, 9, 300))),
            )
        )
        return self._open(path) + sent

    def control(self, chance: Random) -> bytes:
        """Return a handshake and control frames that are wrong, or too many."""
        path = self._path(chance)
        code = chance.choice((0, 999, 1000, 1004, 1005, 1006, 1015, 2999, 3000, 5000, 65535)).to_bytes(2)
        sent = chance.choice(
            (
                _frame(_PING, b"a" * 126, chance),
                _frame(_PING, b"", chance, first=0),
                _frame(_PING, b"a" * 125, chance) * chance.choice((10, 2000)),
                _frame(_PONG, b"unasked", chance) * chance.choice((1, 2000)),
                _frame(_CLOSE, code, chance),
                _frame(_CLOSE, code + b"\xff\xfe", chance),
                _frame(_CLOSE, b"\x03", chance),
                _frame(_CLOSE, b"", chance) * 2,
                _frame(_CLOSE, code + b"a" * 200, chance),
                _frame(_TEXT, b"{", chance, first=0) + _frame(_PING, b"x", chance) + _frame(_CLOSE, code, chance),
                _frame(_CLOSE, code, chance) + _frame(_TEXT, self._body(path), chance),
            )
        )
        return self._open(path) + sent

    def message(self, chance: Random) -> bytes:
        """Return a handshake and a first message with wrong values."""
        path = chance.choice(list(self._bodies))
        writer, document = BodyWriter(chance), dict(self._bodies[path])
        names = [*document, "n", "stop", "logprobs", "seed", "tools", "temperature", "stream_options", "unknown"]
        for _ in range(chance.choice((1, 1, 2))):
            document[chance.choice(names)] = writer.value()
        body = writer.write(document)
        if chance.random() < 0.3:
            body = damaged(body, chance)
        return self._open(path) + _frame(_TEXT, body, chance)

    def damaged(self, chance: Random) -> bytes:
        """Return a good connection with some bytes changed."""
        path = self._path(chance)
        return damaged(self._open(path) + _frame(_TEXT, self._body(path), chance), chance)
