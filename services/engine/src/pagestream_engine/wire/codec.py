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
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from pagestream_engine.errors import MessageError

MAX_BYTES = 1 << 30
"""Of a frame, where a codec has no other limit: the log probabilities of the longest prompt are less."""
_LENGTH = struct.Struct("<Q")
_DTYPES = ("bool", "int32", "int64", "float32", "uint8")
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
        self._kinds = kinds
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
        if number & ~_ESCAPED >= len(self._kinds):
            raise MessageError(f"a frame of kind {number}, expected one below {len(self._kinds)}")
        try:
            if number & _ESCAPED:
                tree = _changed(msgspec.msgpack.decode(body, ext_hook=_number), _unescaped)
                return msgspec.convert(tree, self._kinds[number & ~_ESCAPED], dec_hook=_typed)
            return self._decoders[number].decode(body)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # also those that records raise
            raise MessageError(f"a frame can't be read: {type(error).__name__}: {error}") from error

    def pack(self, record: object) -> bytes:
        """Return a record's frame with its length before it, for a stream. Raises as `encode` does."""
        frame = self.encode(record)
        return _LENGTH.pack(len(frame)) + frame


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


def _plain(value: Any) -> Any:
    """Return what msgpack has for a part that it does not know."""
    if isinstance(value, np.ndarray):
        name = value.dtype.name
        if name not in _DTYPES:
            raise TypeError(f"an array of {name}, expected one of {', '.join(_DTYPES)}")
        return name, value.shape, value.tobytes()
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
    if get_origin(kind) is np.ndarray:
        return _array(value, get_args(get_args(kind)[1])[0])
    if kind is Path and type(value) is bytes:
        return Path(fsdecode(value))
    raise TypeError(f"no {getattr(kind, '__name__', kind)} can be made of {type(value).__name__}")


def _array(value: Any, declared: type[np.generic]) -> npt.NDArray[Any]:
    """Return a declared array: aligned, and not read-only, as the runner may keep and edit it."""
    if type(value) is not list or len(value) != 3:
        raise ValueError("an array without its three parts")
    name, shape, data = value
    dtype = np.dtype(declared)
    if name != dtype.name:
        raise ValueError(f"an array of {name!r:.40}, expected {dtype.name}")
    if type(shape) is not list or type(data) is not bytes or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("an array with a shape of no sizes")
    return np.frombuffer(data, dtype).reshape(shape).copy()


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
