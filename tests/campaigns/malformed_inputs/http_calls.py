"""HTTP requests in good form whose bodies, paths, queries and header fields are wrong, eight on a connection."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from campaigns.malformed_inputs.batches import Batch, Outcome
from campaigns.malformed_inputs.values import BodyWriter, damaged

PIPELINED = 8
"""Requests of a connection: the server takes so many ahead of its answers."""
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_JSON = "application/json"
_IDS = (
    "none",
    "00000000-0000-" + "0" * 32,
    "ffffffff-ffff-" + "f" * 32,
    "resp_1",
    "file-" + "0" * 24,
    "a" * 300,
    "%00",
    "%ff%fe",
    "..%2f..%2fetc",
    "a%0d%0aX-Injected:1",
    "{}*",
    "%F0%9F%98%80",
    "-1",
)
_QUERY_VALUES = ("", "0", "-1", "1e9", "9" * 30, "true", "maybe", "%00", "%ff", "a" * 200, "1&limit=2", "[]", "%C3%28")
_FIELDS = (
    "Idempotency-Key: {}",
    "Authorization: Bearer {}",
    "Authorization: {}",
    "x-api-key: {}",
    "X-Request-Id: {}",
    "X-Request-Seed: {}",
    "Last-Event-ID: {}",
    "Accept: {}",
    "X-Stream-Ids: {}",
    "X-Queue-Comments: {}",
    "anthropic-version: {}",
    "anthropic-beta: {}",
    "Origin: {}",
    "Content-Encoding: {}",
    "Content-Language: {}",
    "Range: {}",
    "Expect: {}",
    "Cookie: {}",
    "traceparent: {}",
    "baggage: {}",
    "X-Forwarded-For: {}",
    "X-Request-Timeout: {}",
    "If-None-Match: {}",
)
_FIELD_VALUES = (
    "",
    " ",
    "a",
    "0",
    "-1",
    "9" * 40,
    "a" * 2000,
    "\xff\xfe",
    "true",
    "gzip",
    "text/event-stream",
    "application/x-ndjson",
    "*/*;q=x",
    "null",
    "http://[::1",
    "00-" + "0" * 32 + "-" + "0" * 16 + "-ff",
    "none/0/",
    "none/18446744073709551616/abc",
    "eyJhbGciOiJub25lIn0.e30.",
    "a.b.c",
    "eyJhbGciOiJSUzI1NiIsImtpZCI6IngifQ.eyJzdWIiOjF9.AAAA",
    ",,,",
    '"',
    "bytes=0-,-",
)
_TYPES = (
    "text/plain",
    "application/xml",
    "",
    "application/json; charset=utf-16",
    "multipart/form-data",
    "APPLICATION/JSON",
)
_DISPOSITIONS = (
    b'Content-Disposition: form-data; name="expires_after[anchor]"',
    b'Content-Disposition: form-data; name="expires_after[seconds]"',
    b'Content-Disposition: form-data; name="file"',
    b'Content-Disposition: form-data; name="\xff"; filename="\\"',
    b"Content-Disposition: form-data",
    b"Content-Disposition: attachment; filename*=UTF-8''%ff%zz",
    b"Content-Type: multipart/mixed; boundary=x",
    b"Content-Transfer-Encoding: base64",
    b"X-Long: " + b"a" * 9000,
    b"no field",
    b"",
)


@dataclass(frozen=True)
class Route:
    """An operation of the OpenAPI document."""

    method: str
    path: str
    parameters: tuple[str, ...]
    """Names in its query."""
    fields: tuple[str, ...]
    """Names in its JSON body."""
    accepted: Mapping[str, Any]
    """A body that is accepted, where one is known."""


def accepted_bodies(model: str) -> dict[str, dict[str, Any]]:
    """Return bodies by path that the gateway accepts; each asks for one token."""
    messages = [{"role": "user", "content": "hello"}]
    texts: dict[str, Any] = {"model": model, "max_tokens": 1}
    return {
        "/v1/completions": {**texts, "prompt": "hello"},
        "/v1/chat/completions": {**texts, "messages": messages},
        "/v1/responses": {"model": model, "input": "hello", "max_output_tokens": 1},
        "/v1/messages": {**texts, "messages": messages},
        "/v1/messages/count_tokens": {"model": model, "messages": messages},
        "/v1/requests/{request_id}": {**texts, "prompt": "hello", "seed": 1},
        "/v1/embeddings": {"model": model, "input": "hello"},
        **{path: {"model": model, "text_1": "a", "text_2": "b"} for path in ("/v1/score", "/score")},
        **{
            path: {"model": model, "query": "a", "documents": ["b"]} for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        },
        "/tokenize": {"model": model, "prompt": "hello"},
        "/detokenize": {"model": model, "tokens": [10, 11]},
        "/v1/batches": {"input_file_id": "none", "endpoint": "/v1/completions", "completion_window": "24h"},
    }


def routes_of(document: Mapping[str, Any], model: str) -> list[Route]:
    """Return the operations of an OpenAPI document."""
    accepted, schemas, found = accepted_bodies(model), document["components"]["schemas"], []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parameters = tuple(each["name"] for each in operation.get("parameters", ()) if each["in"] == "query")
            content = operation.get("requestBody", {}).get("content", {})
            fields = tuple(dict.fromkeys(_fields(content.get(_JSON, {}).get("schema", {}), schemas)))
            body = accepted.get(path, {}) if fields else {}
            found.append(Route(method.upper(), path, parameters, fields, body))
    return found


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    for each in schema.get("anyOf", ()):
        yield from _fields(each, schemas)
    if "$ref" in schema:
        yield from _fields(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    yield from schema.get("properties", ())


class CallAnswers:
    """Answers to requests of which each is complete, until the server closes."""

    patience_s = 60.0

    def __init__(self, num_inputs: int) -> None:
        self._num_inputs = num_inputs
        self._data = bytearray()
        self.is_closed = False
        """Whether the server has closed the connection."""

    def feed(self, data: bytes) -> bool:
        """See AnswerReader."""
        self._data += data
        self.is_closed = not data
        return self.is_closed

    def outcomes(self) -> Counter[Outcome]:
        """See AnswerReader."""
        found = Counter(status_outcome(int(each[1])) for each in _STATUS.finditer(self._data))
        missing = self._num_inputs - found.total()
        found[Outcome.CLOSED if self.is_closed else Outcome.FAILED] += max(0, missing)
        return +found


def status_outcome(status: int) -> Outcome:
    """Return the outcome of an HTTP status."""
    if status == 503:
        return Outcome.UNAVAILABLE
    if status >= 500:
        return Outcome.FAILED
    return Outcome.REFUSED if status >= 400 else Outcome.ACCEPTED


class CallInputs:
    """Makes batches of such requests."""

    def __init__(self, document: Mapping[str, Any], model: str, admin_key: str) -> None:
        """`admin_key`: sent in most calls of administrators' routes; empty where the server knows none."""
        self._admin_key = admin_key
        routes = routes_of(document, model)
        self._with_body = [each for each in routes if each.fields]
        self._others = [each for each in routes if not each.fields]

    def bodies(self, chance: Random) -> Batch:
        """Return requests with wrong bodies."""
        return _batch("HTTP: bodies", [self._body(chance) for _ in range(PIPELINED)])

    def others(self, chance: Random) -> Batch:
        """Return requests with wrong paths, queries, methods and header fields."""
        return _batch("HTTP: paths, queries, fields", [self._other(chance) for _ in range(PIPELINED)])

    def uploads(self, chance: Random) -> Batch:
        """Return uploads of files in wrong forms."""
        return _batch("HTTP: uploads", [_upload(chance) for _ in range(PIPELINED)])

    def _key(self, path: str, chance: Random) -> bytes:
        if not (self._admin_key and path.startswith("/admin/") and chance.random() < 0.8):
            return b""
        return f"Authorization: Bearer {self._admin_key}\r\n".encode()

    def _body(self, chance: Random) -> bytes:
        route = chance.choice(self._with_body)
        writer, document = BodyWriter(chance), dict(route.accepted)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            document[chance.choice(route.fields)] = writer.value()
        draw = chance.random()
        if draw < 0.05:
            document[chance.choice(("unknown", "", "\0", "__proto__", "a" * 300))] = writer.value()
        elif draw < 0.10 and document:
            del document[chance.choice(list(document))]
        elif draw < 0.12:
            document = writer.value()
        body = writer.write(document)
        if chance.random() < 0.3:
            body = damaged(body, chance)
        kind = chance.choice(_TYPES) if chance.random() < 0.03 else _JSON
        more = _field(chance) if chance.random() < 0.1 else b""
        return _request(route.method, _filled(route.path, chance), kind, body, more)

    def _other(self, chance: Random) -> bytes:
        route = chance.choice(self._others if chance.random() < 0.8 else self._with_body)
        path = _filled(route.path, chance)
        if route.parameters or chance.random() < 0.2:
            names = [*route.parameters, "unknown"]
            pairs = (f"{chance.choice(names)}={chance.choice(_QUERY_VALUES)}" for _ in range(chance.randint(1, 3)))
            path += "?" + "&".join(pairs)
        method = (
            chance.choice(("PUT", "PATCH", "OPTIONS", "DELETE", "TRACE")) if chance.random() < 0.1 else route.method
        )
        fields = self._key(path, chance) + b"".join(_field(chance) for _ in range(chance.randrange(4)))
        body = b"" if method == "GET" else chance.choice((b"", b"{}", b"[]", b"x"))
        return _request(method, path, _JSON, body, fields)


def _upload(chance: Random) -> bytes:
    line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"synthetic","prompt":"x"}}\n'
    kind = chance.choice(_DISPOSITIONS)
    file = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + line + b"\r\n"
    purpose = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
    purpose += chance.choice((b"batch", b"", b"none", b"\xff", b"a" * 2000)) + b"\r\n"
    other = b"--x\r\n" + kind + b"\r\n\r\n" + chance.choice((b"", b"1", line, b"--x", b"\0" * 50)) + b"\r\n"
    parts = [purpose, file, other]
    chance.shuffle(parts)
    body = b"".join(parts[: chance.randint(0, 3)] * chance.choice((1, 1, 1, 40))) + b"--x--\r\n"
    if chance.random() < 0.6:
        body = damaged(body, chance)
    form = chance.choice(("x",) * 8 + ('"x"', "", "y", "x" * 300)) if chance.random() < 0.5 else "x"
    return _request("POST", "/v1/files", f"multipart/form-data; boundary={form}", body, b"")


def _batch(kind: str, requests: list[bytes]) -> Batch:
    last = requests[-1].replace(b"Host: localhost\r\n", b"Host: localhost\r\nConnection: close\r\n", 1)
    return Batch(kind, b"".join([*requests[:-1], last]), len(requests), CallAnswers(len(requests)))


def _filled(path: str, chance: Random) -> str:
    return re.sub(r"\{[^}]*\}", lambda _: chance.choice(_IDS), path)


def _field(chance: Random) -> bytes:
    return chance.choice(_FIELDS).format(chance.choice(_FIELD_VALUES)).encode("latin-1") + b"\r\n"


def _request(method: str, path: str, kind: str, body: bytes, more: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode("latin-1") + more + b"\r\n" + body
