"""Calls with wrong messages of every method, many on a connection, and connections whose frames are wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from campaigns.malformed_inputs.batches import Batch, Outcome
from campaigns.malformed_inputs.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    PUSH,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_fields,
    field_of,
    frame,
    header_block,
    message,
    opening,
    read_frames,
)
from campaigns.malformed_inputs.values import damaged
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from pagestream.v1 import inference_pb2 as api

CALLS = 64
"""Calls of a connection."""
_MAX_BYTES = 48_000  # of their messages, below the window that a server begins with
_FAILED = (StatusCode.UNKNOWN, StatusCode.INTERNAL)
_BY_NUMBER = {each.value[0]: each for each in StatusCode}
_TEXTS = ("", "none", "\0", "a" * 700, "\U0001f600", "-1", "../..", "00000000-0000-" + "0" * 32, "{", "(a+)+$")
_FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, 5e-324)
_INTEGERS = (0, 1, -1, 7, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
_SERVICE = "/pagestream.v1.Inference/"


def seeds(model: str) -> Mapping[str, Message]:
    """Return a good message for each method."""
    sampling = api.SamplingParams(max_tokens=1, temperature=0.5)
    generate = api.GenerateRequest(model=model, prompt="hello", sampling=sampling)
    chat = api.ChatInput(messages=[api.ChatMessage(role="user", content="hello")])
    embed = api.EmbedRequest(model=model, texts=["hello"])
    score = api.ScoreRequest(model=model, queries=["a"], documents=["b"])
    info = reflection_pb2.ServerReflectionRequest(file_containing_symbol="pagestream.v1.Inference")
    return {
        f"{_SERVICE}Generate": generate,
        f"{_SERVICE}Generate ": api.GenerateRequest(model=model, chat=chat, sampling=sampling),
        f"{_SERVICE}Resume": api.ResumeRequest(request_id="none", request=generate),
        f"{_SERVICE}Cancel": api.CancelRequest(request_id="none"),
        f"{_SERVICE}GetRequest": api.GetRequestRequest(request_id="none"),
        f"{_SERVICE}Embed": embed,
        f"{_SERVICE}Score": score,
        f"{_SERVICE}ListModels": api.ListModelsRequest(),
        "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest(service="none"),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": info,
    }


class CallAnswers:
    """The statuses of the calls of a connection."""

    patience_s = 30.0

    def __init__(self, num_calls: int, expected: frozenset[StatusCode] = frozenset()) -> None:
        """`expected`: statuses of failures that the input asks for."""
        self._expected = expected
        self._open = set(range(1, 2 * num_calls, 2))
        self._found: Counter[Outcome] = Counter()
        self._data = bytearray()
        self._is_ended = False

    def feed(self, data: bytes) -> bool:
        """See AnswerReader."""
        self._data += data
        self._is_ended = self._is_ended or not data
        for each in read_frames(self._data):
            if each.kind == GOAWAY:
                self._is_ended = True
            elif each.kind == RST_STREAM:
                self._end(each.stream, Outcome.REFUSED)
            elif each.kind == HEADERS and each.flags & END_STREAM:
                self._end(each.stream, self._outcome(each.payload))
        return self._is_ended or not self._open

    def outcomes(self) -> Counter[Outcome]:
        """See AnswerReader."""
        left = Outcome.CLOSED if self._is_ended else Outcome.FAILED
        return self._found + Counter({left: len(self._open)})

    def _end(self, stream: int, outcome: Outcome) -> None:
        if stream in self._open:
            self._open.remove(stream)
            self._found[outcome] += 1

    def _outcome(self, block: bytes) -> Outcome:
        text = field_of(block, b"grpc-status")
        if text is None or not text.isdigit():
            return Outcome.REFUSED  # an HTTP status alone
        status = _BY_NUMBER.get(int(text), StatusCode.UNKNOWN)
        if status is StatusCode.OK:
            return Outcome.ACCEPTED
        if status is StatusCode.UNAVAILABLE:
            return Outcome.UNAVAILABLE
        is_failed = status in _FAILED and status not in self._expected
        return Outcome.FAILED if is_failed else Outcome.REFUSED


class ConnectionAnswers(CallAnswers):
    """The end of a connection whose frames are wrong; gRPC's own library may answer INTERNAL to those."""

    patience_s = 1.0

    def __init__(self) -> None:
        super().__init__(1, frozenset((StatusCode.INTERNAL, StatusCode.UNKNOWN)))

    def outcomes(self) -> Counter[Outcome]:
        """See AnswerReader."""
        if self._is_ended or self._found:
            return super().outcomes()
        return Counter([Outcome.UNANSWERED])


class GrpcInputs:
    """Makes both kinds."""

    def __init__(self, model: str) -> None:
        self._seeds = list(seeds(model).items())

    def messages(self, chance: Random) -> Batch:
        """Return calls with wrong messages."""
        sent, size, number = [opening(), frame(SETTINGS, ACK, 0)], 0, 0
        while number < CALLS and size < _MAX_BYTES:
            method, seed = chance.choice(self._seeds)
            data = message(_wrong(seed, chance)[: _MAX_BYTES // 4])
            size += len(data)
            stream = 2 * number + 1
            sent.append(frame(HEADERS, END_HEADERS, stream, header_block(call_fields(method.strip()))))
            sent += _pieces(stream, data)
            number += 1
        return Batch("gRPC: messages", b"".join(sent), number, CallAnswers(number), is_grpc=True)

    def calls(self, chance: Random) -> Batch:
        """Return a call whose header or framing is wrong."""
        method, seed = chance.choice(self._seeds)
        data = seed.SerializeToString()
        wrong = chance.choice(
            (
                (b"grpc-timeout", chance.choice((b"", b"1", b"-1S", b"99999999999S", b"1X", b"0n"))),
                (b"grpc-encoding", chance.choice((b"gzip", b"x", b""))),
                (b"grpc-accept-encoding", b"x,y,,"),
                (b"content-type", chance.choice((b"application/json", b"", b"application/grpc+x"))),
                (b"x-large", b"a" * 40_000),
                (b"X-Upper", b"a"),
                (b"a-bin", b"not base64!"),
                (b"authorization", b"Bearer " + b"a" * 3000),
                (b"traceparent", b"00-zz"),
                (b":path", b"/pagestream.v1.Inference/Nothing"),
                (b":late", b"a"),
                (b"bad name", b"a"),
                (b"nul", b"a\0b"),
                (b"connection", b"close"),
            )
        )
        body = chance.choice(
            (
                message(data),
                message(data, flag=1),
                message(data, flag=255),
                message(data, length=len(data) + 9),
                message(data, length=2**32 - 1),
                message(data, length=max(0, len(data) - 1)),
                message(data) * 2,
                message(data)[:3],
                b"",
            )
        )
        fields = call_fields(method.strip(), wrong)
        if chance.random() < 0.2:
            fields = [each for each in fields if each[0] != chance.choice((b":method", b":path", b"te", b":scheme"))]
        sent = frame(HEADERS, END_HEADERS, 1, header_block(fields)) + b"".join(_pieces(1, body))
        return Batch("gRPC: headers and framing", opening() + sent, 1, ConnectionAnswers(), is_grpc=True)

    def frames(self, chance: Random) -> Batch:
        """Return a connection whose frames are wrong."""
        method, seed = chance.choice(self._seeds)
        block = header_block(call_fields(method.strip()))
        call = frame(HEADERS, END_HEADERS, 1, block) + b"".join(_pieces(1, message(seed.SerializeToString())))
        make: Callable[[], bytes] = chance.choice(
            (
                lambda: PREFACE[: chance.randrange(24)] + chance.randbytes(30),
                lambda: opening() + frame(SETTINGS, 0, 0, chance.randbytes(chance.choice((5, 6, 12)))),
                lambda: opening() + frame(SETTINGS, 0, 1) + call,
                lambda: opening() + frame(SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff") + call,
                lambda: opening() + frame(SETTINGS, 0, 0, b"\0\5\0\0\0\1") + call,
                lambda: opening() + frame(SETTINGS, 0, 0) * chance.choice((10, 500)),
                lambda: opening() + frame(PING, 0, 0, b"a" * 7),
                lambda: opening() + frame(PING, 0, 0, b"a" * 8) * chance.choice((3, 500)),
                lambda: opening() + frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\0"),
                lambda: opening() + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 2,
                lambda: opening() + frame(RST_STREAM, 0, 7, b"\0\0\0\0"),
                lambda: opening() + frame(RST_STREAM, 0, 1, b"\0"),
                lambda: opening() + frame(DATA, END_STREAM, 0, b"a"),
                lambda: opening() + frame(DATA, END_STREAM, 9, b"a"),
                lambda: opening() + frame(HEADERS, END_HEADERS, 2, block),
                lambda: opening() + frame(HEADERS, 0, 1, block) + frame(DATA, 0, 1, b"a"),
                lambda: opening() + frame(HEADERS, 0, 1, block) + frame(CONTINUATION, 0, 1, b"") * 200,
                lambda: opening() + frame(HEADERS, END_HEADERS, 1, chance.randbytes(60)),
                lambda: opening() + frame(HEADERS, END_HEADERS, 1, b"\x3f\xff\xff\xff\xff\xff\xff\xff\xff\x7f"),
                lambda: opening() + frame(HEADERS, END_HEADERS | 0x08, 1, b"\xff" + block),
                lambda: opening() + frame(PUSH, END_HEADERS, 1, b"\0\0\0\2" + block),
                lambda: opening() + frame(PRIORITY, 0, 1, b"\0\0\0\1\0") + call,
                lambda: opening() + b"\xff\xff\xff" + bytes((DATA, 0)) + b"\0\0\0\1" + b"a" * 100,
                lambda: opening() + frame(chance.choice((11, 77, 255)), 255, 1, chance.randbytes(20)) + call,
                lambda: opening() + _resets(block, chance.choice((10, 200))),
                lambda: opening() + call + call,
                lambda: opening() + frame(GOAWAY, 0, 0, b"\0\0\0\0\0\0\0\0") + call,
                lambda: damaged(opening() + call, chance),
                lambda: opening() + damaged(call, chance),
                lambda: opening() + damaged(call, chance),
            )
        )
        return Batch("gRPC: frames", make(), 1, ConnectionAnswers(), is_grpc=True)


def _resets(block: bytes, count: int) -> bytes:
    """Return calls that are cancelled at once (CVE-2023-44487)."""
    streams = range(1, 2 * count, 2)
    cancel = (8).to_bytes(4)
    return b"".join(frame(HEADERS, END_HEADERS, each, block) + frame(RST_STREAM, 0, each, cancel) for each in streams)


def _pieces(stream: int, data: bytes) -> list[bytes]:
    """Return the frames of a call's body, which ends it."""
    pieces = [data[start : start + 16_000] for start in range(0, len(data), 16_000)] or [b""]
    return [
        frame(DATA, END_STREAM if number == len(pieces) - 1 else 0, stream, piece)
        for number, piece in enumerate(pieces)
    ]


def _wrong(seed: Message, chance: Random) -> bytes:
    """Return the bytes of a message like `seed` that is wrong."""
    draw = chance.random()
    if draw < 0.35:
        return damaged(seed.SerializeToString(), chance)
    if draw < 0.5:
        return seed.SerializeToString() + _wire_noise(chance)
    changed = type(seed)()
    changed.CopyFrom(seed)
    for _ in range(chance.choice((1, 1, 2, 3))):
        _set_field(changed, chance)
    return changed.SerializeToString()


def _wire_noise(chance: Random) -> bytes:
    """Return fields of known and unknown numbers in wrong wire types."""
    number = chance.choice((0, 1, 2, 3, 4, 5, 9, 15, 100, 2**29 - 1))
    kind = chance.randrange(8)
    tag = _varint(number << 3 | kind)
    nested = chance.choice((1, 50, 400))
    return chance.choice(
        (
            tag + chance.randbytes(chance.randrange(12)),
            tag + b"\xff" * 10,
            tag + _varint(2**40),
            tag + _varint(5) + b"\xff\xfe\xfd\xfc\xfb",
            _varint(number << 3 | 3) * nested,
            _varint(number << 3 | 4),
            (_varint(number << 3 | 2) + _varint(2)) * nested,
            b"\x00",
        )
    )


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 128:
        found.append(value % 128 | 128)
        value //= 128
    return bytes((*found, value))


def _set_field(target: Any, chance: Random) -> None:
    """Set some field of a message, or of one in it, to a value that is wrong or at an end of its range."""
    fields = target.DESCRIPTOR.fields
    if not fields:
        return
    field = chance.choice(fields)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if field.message_type.GetOptions().map_entry:
            return
        inner = getattr(target, field.name)
        if field.is_repeated:
            for _ in range(chance.choice((1, 2, 40))):
                _set_field(inner.add(), chance)
        else:
            inner.SetInParent()
            _set_field(inner, chance)
        return
    value = _scalar(field, chance)
    if field.is_repeated:
        getattr(target, field.name).extend([value] * chance.choice((1, 2, 300)))
    else:
        setattr(target, field.name, value)


def _scalar(field: Any, chance: Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = chance.choice(_TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    bounds = {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    }
    low, high = bounds[kind]
    return min(high, max(low, chance.choice(_INTEGERS)))
