"""Typed records as bytes, and back. Decoding runs no code of what was sent: a frame gives a record of the kinds that
its reader has named, with parts of the types that these declare, or an error.

A frame is a byte with the record's kind, its number among those of the codec, then the record in msgpack. Both ends of
a connection have the same codec: they are started from one installation, or compare its `schema` first.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from os import fsdecode, fsencode
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pagestream_engine.errors import MessageError, RequestFault

MAX_BYTES = 1 << 30
"""Of a frame, where a codec has no other limit: the log probabilities of the longest prompt are less."""
_LENGTH = struct.Struct("<Q")
_DTYPES: dict[str, np.dtype[Any]] = {
    dtype.char: dtype for dtype in map(np.dtype, ("bool", "int32", "int64", "float32", "uint8"))
}
_ESCAPED = 0x80
"""Flag of a kind: what msgpack has not is escaped. That is half of a surrogate pair, which a path that is no UTF-8 has,
and a stop string may have; and a number of more than 64 bits, as in a JSON schema."""
_NUMBER = 1
"""Code of a long number's extension type."""


class Codec:
    """Encodes and decodes records of some kinds: Structs, dataclasses and NamedTuples, of plain values, paths, numpy
    arrays and one another.

    Args:
        kinds: at most 128.
        max_bytes: most bytes of a frame.
    """

    def __init__(self, *kinds: type, max_bytes: int = MAX_BYTES) -> None:
        self.kinds = kinds
        self._numbers = {kind: number for number, kind in enumerate(kinds)}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [
            msgspec.msgpack.Decoder(kind, dec_hook=_typed) for kind in kinds
        ]
        self.max_bytes = max_bytes

    def encode(self, record: object) -> bytearray:
        """Return a record's frame.

        Raises:
            MessageError: it is of no known kind, has a part that no frame can have, or is too large.
        """
        number = self._numbers.get(type(record))
        if number is None:
            raise MessageError(f"{type(record).__name__} is no message of this connection")
        frame = bytearray((number,))
        try:
            self._encoder.encode_into(record, frame, 1)
        except (UnicodeEncodeError, OverflowError):
            tree = msgspec.to_builtins(record, builtin_types=(bytes, memoryview), enc_hook=_plain)
            frame[:] = (number | _ESCAPED,)
            self._encoder.encode_into(_changed(tree, _escaped), frame, 1)
        except (TypeError, ValueError, RecursionError) as error:
            raise MessageError(f"{type(record).__name__} can't be sent: {error}") from error
        if len(frame) > self.max_bytes:
            raise MessageError(f"{type(record).__name__} takes {len(frame)} bytes, expected at most {self.max_bytes}")
        return frame

    def decode(self, frame: bytes | bytearray | memoryview) -> Any:
        """Return the record of a frame.

        Raises:
            MessageError: the frame is not one of `encode`'s.
        """
        if not 0 < len(frame) <= self.max_bytes:
            raise MessageError(f"a frame of {len(frame)} bytes, expected 1 to {self.max_bytes}")
        number, body = frame[0], memoryview(frame)[1:]
        if number & ~_ESCAPED >= len(self.kinds):
            raise MessageError(f"a frame of kind {number}, expected one below {len(self.kinds)}")
        try:
            if number & _ESCAPED:
                tree = _changed(msgspec.msgpack.decode(body, ext_hook=_number), _unescaped)
                return msgspec.convert(tree, self.kinds[number & ~_ESCAPED], dec_hook=_typed)
            return self._decoders[number].decode(body)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # also those that records raise
            raise MessageError(f"a frame can't be read: {type(error).__name__}: {error}") from error

    def pack(self, record: object) -> bytes:
        """Return a record's frame with its length before it, for a stream. Raises as `encode` does."""
        frame = self.encode(record)
        return _LENGTH.pack(len(frame)) + frame

    @property
    def schema(self) -> str:
        """The records, and those within them, with the names and types of their parts: both ends have to share it."""
        seen: dict[str, list[str]] = {}
        for info in msgspec.inspect.multi_type_info(self.kinds):
            _describe(info, seen)
        return f"{[kind.__name__ for kind in self.kinds]} {sorted(seen.items())}"


class Frames:
    """Cuts a stream of what `Codec.pack` gives into records.

    Args:
        codec: the sender's.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add what was received; yield each record that is complete.

        Raises:
            MessageError: a frame is too large, or no record. Nothing after it can be read.
        """
        self._data += data
        start, end = 0, len(self._data)
        try:
            while end - start >= _LENGTH.size:
                [length] = _LENGTH.unpack_from(self._data, start)
                if length > self._codec.max_bytes:
                    raise MessageError(f"a frame of {length} bytes, expected at most {self._codec.max_bytes}")
                first = start + _LENGTH.size
                if end - first < length:
                    break
                start = first + length
                yield self._codec.decode(bytes(self._data[first:start]))
        finally:
            del self._data[:start]


def _describe(info: Any, seen: dict[str, list[str]]) -> str:
    """Return a type in words, and note the records in it."""
    if isinstance(info, tuple):
        return f"({', '.join(_describe(each, seen) for each in info)})"
    if isinstance(info, msgspec.inspect.CustomType):
        return str(info.cls)
    cls, parts = getattr(info, "cls", None), getattr(info, "fields", None)
    if cls is not None and parts is not None:
        if cls.__name__ not in seen:
            seen[cls.__name__] = []
            seen[cls.__name__] += [f"{part.encode_name}: {_describe(part.type, seen)}" for part in parts]
        return str(cls.__name__)
    names = ("types", "item_types", "item_type", "key_type", "value_type")
    within = [_describe(getattr(info, name), seen) for name in names if hasattr(info, name)]
    return type(info).__name__ + (f"[{', '.join(within)}]" if within else "")


_ARRAYS = {npt.NDArray[dtype.type]: dtype.kind for dtype in _DTYPES.values()}  # type: ignore[name-defined]
"""Types of arrays that a record may declare."""


def _plain(value: Any) -> Any:
    """Return what msgpack has for a part that it does not know."""
    if isinstance(value, np.ndarray):
        code = value.dtype.char
        if code not in _DTYPES:
            expected = ", ".join(dtype.name for dtype in _DTYPES.values())
            raise TypeError(f"an array of {value.dtype.name}, expected one of {expected}")
        data = code.encode() + value.tobytes()
        return data if value.ndim == 1 else (value.shape, data)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return fsencode(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no part of a message")


def _typed(kind: Any, value: Any) -> Any:
    """Return the part of a declared type that `_plain` gave this for."""
    declared = _ARRAYS.get(kind)
    if declared is not None:
        return _array(value, declared)
    if kind is RequestFault and type(value) is str:
        return RequestFault(value)
    if kind is Path and type(value) is bytes:
        return Path(fsdecode(value))
    raise TypeError(f"no {getattr(kind, '__name__', kind)} can be made of {type(value).__name__}")


def _array(value: Any, declared: str) -> npt.NDArray[Any]:
    """Return an array of a declared kind: aligned, and not read-only, as the runner may keep and edit it."""
    shape, data = value if type(value) is list and len(value) == 2 else (None, value)
    if type(data) is not bytes:
        raise ValueError("an array without data")
    dtype = _DTYPES.get(chr(data[0])) if data else None
    if dtype is None or dtype.kind != declared:
        raise ValueError(f"an array of {data[:1]!r}, expected the kind {declared}")
    array = np.frombuffer(data, dtype, offset=1) if len(data) > 1 else np.empty(0, dtype)
    if shape is not None:
        if type(shape) is not list or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("an array with a shape of no sizes")
        array = array.reshape(shape)
    return array.copy()


def _changed(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tree of plain values with its leaves changed."""
    if isinstance(tree, dict):
        return {_changed(key, change): _changed(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_changed(value, change) for value in tree]
    return change(tree)


def _escaped(leaf: Any) -> Any:
    if isinstance(leaf, str):
        return leaf.encode("utf-8", "surrogatepass").decode("latin-1")
    if isinstance(leaf, int) and not -(1 << 63) <= leaf < 1 << 64:
        return msgspec.msgpack.Ext(_NUMBER, leaf.to_bytes(leaf.bit_length() // 8 + 1, signed=True))
    return leaf


def _unescaped(leaf: Any) -> Any:
    return leaf.encode("latin-1").decode("utf-8", "surrogatepass") if isinstance(leaf, str) else leaf


def _number(code: int, data: memoryview) -> int:
    if code != _NUMBER:
        raise ValueError(f"an extension of type {code}")
    return int.from_bytes(data, signed=True)
