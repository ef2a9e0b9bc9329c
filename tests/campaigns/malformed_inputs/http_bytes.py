"""Bytes that are no HTTP/1.1, or HTTP/1.1 that two readers may take for different requests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from random import Random

from campaigns.malformed_inputs.batches import Batch, Outcome
from campaigns.malformed_inputs.http_calls import status_outcome
from campaigns.malformed_inputs.values import damaged

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_BODY = b'{"model":"x","prompt":"hello","max_tokens":1}'
_HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
_LENGTHS = (
    b"-1|+45|0x2d|45 |4 5|45,45|45, 46||1e2|99999999999999999999|9000000|0|10|46|\xb2|045|18446744073709551617".split(
        b"|"
    )
)
_CONTROLS = [bytes((each,)) for each in (0, 1, 7, 9, 10, 11, 13, 27, 127, 128, 255)]


class ByteAnswers:
    """The answer to bytes that may be no request."""

    patience_s = 1.0

    def __init__(self, *, is_ambiguous: bool = False) -> None:
        """`is_ambiguous`: the bytes hide a second request, which must not be answered."""
        self._is_ambiguous = is_ambiguous
        self._data = bytearray()
        self._is_closed = False

    def feed(self, data: bytes) -> bool:
        """See AnswerReader."""
        self._data += data
        self._is_closed = not data
        return self._is_closed

    def outcomes(self) -> Counter[Outcome]:
        """See AnswerReader."""
        statuses = [int(each[1]) for each in _STATUS.finditer(bytes(self._data)) if each[1] != b"100"]
        if any(status_outcome(each) is Outcome.FAILED for each in statuses):
            return Counter([Outcome.FAILED])
        if statuses:
            is_smuggled = self._is_ambiguous and len(statuses) > 1
            return Counter([Outcome.FAILED if is_smuggled else status_outcome(statuses[0])])
        return Counter([Outcome.CLOSED if self._is_closed else Outcome.UNANSWERED])


def _request(*fields: bytes, line: bytes = b"POST /v1/completions HTTP/1.1", body: bytes = _BODY) -> bytes:
    if not any(field.lower().startswith((b"content-length", b"transfer-encoding")) for field in fields):
        fields = (*fields, b"Content-Length: %d" % len(body))
    standard = (b"Host: localhost", b"Content-Type: application/json", b"Connection: close")
    return b"\r\n".join((line, *standard, *fields)) + b"\r\n\r\n" + body


def request_line(chance: Random) -> bytes:
    """Return a request with a broken first line."""
    noise = chance.randbytes(chance.randint(1, 12))
    line = chance.choice(
        (
            b"POST /v1/completions",
            b"POST  /v1/completions HTTP/1.1",
            b"POST /v1/completions HTTP/1.1 ",
            b"POST /v1/completions HTTP/9.9",
            b"POST /v1/completions HTTP/2.0",
            b"POST /v1/completions HTTP/1",
            b"POST /v1/completions http/1.1",
            b"POST /v1/comp letions HTTP/1.1",
            b"post /v1/completions HTTP/1.1",
            b"P\x00ST /v1/completions HTTP/1.1",
            b" POST /v1/completions HTTP/1.1",
            b"POST\t/v1/completions\tHTTP/1.1",
            b"POST http://localhost/v1/completions HTTP/1.1",
            b"POST http://[::1/v1/completions HTTP/1.1",
            b"POST //v1//completions HTTP/1.1",
            b"POST /v1/%zz%/completions HTTP/1.1",
            b"POST /v1/completions?%ff=%00#x HTTP/1.1",
            b"POST * HTTP/1.1",
            b"OPTIONS * HTTP/1.1",
            b"CONNECT localhost:1 HTTP/1.1",
            b"TRACE / HTTP/1.1",
            b"POST localhost:80 HTTP/1.1",
            b"",
            b"\r\n" * 20,
            b"POST /" + b"a" * chance.choice((1000, 40_000)) + b" HTTP/1.1",
            b"GET /v1/models HTTP/0.9",
            noise + b" /v1/completions HTTP/1.1",
            b"POST /" + noise + b" HTTP/1.1",
            b"POST /v1/completions HTTP/1.1" + noise,
            chance.choice((b"PRI", b"M-SEARCH", b"PURGE", b"SOURCE", b"DESCRIBE")) + b" /v1/models HTTP/1.1",
        )
    )
    return _request(line=line)


def header_fields(chance: Random) -> bytes:
    """Return a request with broken or too many header fields."""
    control = chance.choice(_CONTROLS)
    fields = chance.choice(
        (
            [b"X-%d: a" % number for number in range(chance.choice((100, 200, 2000)))],
            [b"X-Long: " + b"a" * chance.choice((8_000, 40_000))],
            [b"a" * 40_000 + b": a"],
            [b"X-A" + control + b"B: a"],
            [b"X-A: a" + control + b"b"],
            [b"X-A : a"],
            [b" X-A: a"],
            [b": a"],
            [b"X-A"],
            [b"X-A: a", b"\tfolded", b" and again"],
            [b"Host: example.com"],
            [b"Host: localhost", b"Host: localhost"],
            [b"Host: local\xc3\xa9host"],
            [b"Connection: " + control],
            [b"Connection: close, keep-alive, upgrade", b"Upgrade: h2c", b"HTTP2-Settings: AAAA"],
            [b"Upgrade: websocket"],
            [b"Expect: 100-continue"],
            [b"Expect: 200-ok"],
            [b"Content-Type: application/json" + control],
            [b"Authorization: Bearer " + chance.randbytes(20).replace(b"\n", b"")],
            [b"Cookie: " + b"a=b; " * 4000],
            [b"X-A: a\rX-B: b"],
            [b"X-A: a\nX-B: b"],
        )
    )
    return _request(*fields)


def lengths(chance: Random) -> bytes:
    """Return a request whose body's length is wrong."""
    length = chance.choice(_LENGTHS)
    fields = [b"Content-Length: " + length]
    if chance.random() < 0.3:
        fields.append(b"Content-Length: " + chance.choice((b"45", b"0", length)))
    return _request(*fields)


def chunks(chance: Random) -> bytes:
    """Return a request with a broken chunked body."""
    good = b"%x\r\n%b\r\n" % (len(_BODY), _BODY)
    body = chance.choice(
        (
            b"zz\r\n" + good,
            b"-5\r\nhello\r\n0\r\n\r\n",
            b"ffffffffffffffffff\r\nhello\r\n0\r\n\r\n",
            b"7fffffffffffffff\r\nhello",
            b"0x5\r\nhello\r\n0\r\n\r\n",
            b"5 \r\nhello\r\n0\r\n\r\n",
            b"5\nhello\n0\n\n",
            b"5\r\nhelloworld\r\n0\r\n\r\n",
            b"5;a=" + b"b" * chance.choice((10, 40_000)) + b"\r\nhello\r\n0\r\n\r\n",
            b"5;\x00\r\nhello\r\n0\r\n\r\n",
            b"1\r\na\r\n" * chance.choice((500, 3000)) + b"0\r\n\r\n",
            good + b"0\r\nX-Trailer: a\r\n\r\n",
            good + b"0\r\n" + b"X-T: a\r\n" * chance.choice((10, 500)) + b"\r\n",
            good + b"0\r\nContent-Length: 5\r\n\r\nhello",
            good + b"0\r\n",
            good,
            good * 2 + b"0\r\n\r\n",
            b"\r\n" + good,
            b"0\r\n\r\n",
            b"",
        )
    )
    coding = chance.choice((b"chunked",) * 6 + (b"Chunked", b"chunked, chunked", b"gzip, chunked", b"xchunked"))
    coding = chance.choice((coding, coding, coding, b"chunked, identity", b"identity", b"\x0bchunked", b"chunked;a"))
    return _request(b"Transfer-Encoding: " + coding, body=body)


def ambiguous(chance: Random) -> bytes:
    """Return a request that hides another, for a reader that takes its length from another field."""
    coding = chance.choice(
        (
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding : chunked",
            b"Transfer-Encoding: xchunked",
            b"Transfer-Encoding:\tchunked",
            b"Transfer-Encoding: chunked, identity",
            b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
            b"X: a\nTransfer-Encoding: chunked",
            b"Transfer-Encoding\r\n : chunked",
            b"Transfer_Encoding: chunked\r\nTransfer-Encoding: chunked",
        )
    )
    hidden = b"0\r\n\r\n" + _HIDDEN
    length = chance.choice((len(hidden), 5, 3, len(hidden) + 5))
    fields = [b"Content-Length: %d" % length, coding]
    if chance.random() < 0.5:
        fields.reverse()
    if chance.random() < 0.2:
        fields = [b"Content-Length: 0", b"Content-Length: %d" % len(hidden)]
    return _request(*fields, body=hidden).replace(b"Connection: close\r\n", b"", 1)


def other_protocols(chance: Random) -> bytes:
    """Return the beginning of another protocol, or noise."""
    return chance.choice(
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),
            b"SSH-2.0-x\r\n",
            b"*1\r\n$4\r\nPING\r\n",
            b"\0" * 200,
            b"\r\n" * 500,
            b"GET /v1/models\r\n",
            chance.randbytes(chance.choice((1, 16, 300, 5000))),
            bytes(chance.choice(b"GETPOS /:.\r\n\t1") for _ in range(200)),
        )
    )


def damaged_request(chance: Random) -> bytes:
    """Return a good request with some bytes changed."""
    good = chance.choice((_request(), _request(line=b"GET /v1/requests/none/events?from=0 HTTP/1.1", body=b"")))
    return damaged(good, chance)


_MAKERS: tuple[tuple[str, Callable[[Random], bytes]], ...] = (
    ("HTTP: request lines", request_line),
    ("HTTP: header fields", header_fields),
    ("HTTP: lengths", lengths),
    ("HTTP: chunks", chunks),
    ("HTTP: two lengths", ambiguous),
    ("HTTP: other protocols", other_protocols),
    ("HTTP: changed bytes", damaged_request),
)


def batch(chance: Random) -> Batch:
    """Return one of these inputs, which has a connection of its own."""
    kind, make = chance.choice(_MAKERS)
    return Batch(kind, make(chance), 1, ByteAnswers(is_ambiguous=make is ambiguous))
