"""Parse protobuf messages as they arrive, so that an undecodable one is reported as INVALID_ARGUMENT."""

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from pagestream_gateway.errors import InvalidRequest

M = TypeVar("M", bound=Message)
_MAX_DEPTH = 100  # protobuf's own limit
# Descriptors are `Any` here: protobuf's C and Python ones share no type.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _CorruptError(Exception):
    """The bytes are not a protobuf message."""


def parse_message(kind: type[M], data: bytes) -> M:
    """Return the message. Raises InvalidRequest, with the field where text in it is not UTF-8."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        field = _find_bad_text(data, kind.DESCRIPTOR)
        if field is not None:
            raise InvalidRequest(field, "is not valid UTF-8") from error
        raise InvalidRequest(None, f"the bytes are not a {kind.DESCRIPTOR.full_name}") from error
    return message


def _find_bad_text(data: bytes, descriptor: Any) -> str | None:
    try:
        return _search(memoryview(data), descriptor, 0)
    except _CorruptError:
        return None


def _search(data: memoryview, descriptor: Any, depth: int) -> str | None:
    if depth > _MAX_DEPTH:
        return None
    for number, value in _texts_and_messages(data):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                str(value, "utf-8")
            except UnicodeDecodeError:
                return str(field.name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            inner = _search(value, field.message_type, depth + 1)
            if inner is not None:
                return f"{field.name}.{inner}"
    return None


def _texts_and_messages(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield numbers and contents of the length-delimited fields."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            _, place = _varint(data, place)
        elif wire_type == _FIXED64:
            place += 8
        elif wire_type == _FIXED32:
            place += 4
        elif wire_type == _BYTES:
            length, place = _varint(data, place)
            if length > len(data) - place:
                raise _CorruptError
            yield number, data[place : place + length]
            place += length
        else:
            raise _CorruptError


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise _CorruptError
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise _CorruptError
