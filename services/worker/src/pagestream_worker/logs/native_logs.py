"""The logs in C++ (token_logs.cpp): one call for the tokens of a step, and one for all appends.

`open_logs` chooses between these and logs in Python, which give the same bytes.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Collection, Sequence

import orjson
from pagestream_streams import Claim
from pagestream_streams.protocol.keys import parse_request_id
from pagestream_streams.protocol.records import EntryValues, TokenAppends

from pagestream_worker.logs.library import load_library
from pagestream_worker.logs.token_logs import PendingLogs, PythonLogs, TokenBatch, TokenLog, TokenLogs, has_plain_tokens
from pagestream_worker.messages import TokenColumns

_FAILED = -1
_HEADER = struct.Struct("=4I c ? 16s 2x")
"""Of an entry: lengths of choice, value, text and extra, the kind, whether extra is bytes, the digest."""
_N, _S, _P = ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "logs_new": ([], _P),
    "logs_delete": ([_P], None),
    "logs_held_bytes": ([_P], _N),
    "logs_open": ([_P, _N, _N, _S, _N, _S, _N, _S, _N], _N),
    "logs_close": ([_P, _N], None),
    "logs_write": ([_P, _N, ctypes.c_char, _S, _N, _S, _N, _S, _N, _S, _N, ctypes.c_int], _N),
    "logs_take": ([_P, _N, _S, _S, _S, _S, _N], _N),
    "logs_pending": ([_P, _N, _S, _N, _P], _N),
    "logs_acknowledge": ([_P, _N, _S, _S], _N),
    "logs_entries": ([_P, _N, _N, _P], _N),
    "logs_drop_oldest": ([_P, _N], _N),
    "logs_state": ([_P, _N, _P], _N),
}


class NativeLogError(RuntimeError):
    """The C++ logs were out of memory, were given more than 16 MiB in one value, or were used after their end."""


class _Pending(ctypes.Structure):
    _fields_ = (
        *((name, _N) for name in ("num_logs", "num_partitions", "num_others")),
        *((name, _P) for name in ("logs", "wake_ends", "partitions", "counts", "values_ends", "others")),
        *((name, _P) for name in ("values", "wake_ups")),
        ("wake_bytes", _N),
    )


class _Entries(ctypes.Structure):
    _fields_ = (
        ("count", _N),
        ("packed", _P),
        ("num_bytes", _N),
        ("previous", ctypes.c_char * 16),
        ("previous_length", ctypes.c_int),
    )


class _State(ctypes.Structure):
    _fields_ = tuple((name, _N) for name in ("next_index", "end_index", "first_kept", "num_bytes", "num_taken"))


class NativeLogs:
    """See TokenLogs.

    Args:
        limit_bytes: of all packed entries.
    """

    def __init__(self, library: ctypes.PyDLL, limit_bytes: int) -> None:
        self.library = library
        self.table: int | None = None
        """The address of its C++ object."""
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        self.table = library.logs_new()
        if not self.table:
            raise NativeLogError("there is no memory for the logs")
        self.limit_bytes = limit_bytes
        """See TokenLogs."""
        self._pending = _Pending()

    def __del__(self) -> None:
        if self.table is not None:
            self.library.logs_delete(self.table)

    @property
    def held_bytes(self) -> int:
        """See TokenLogs."""
        num_bytes: int = self.library.logs_held_bytes(self.table)
        return num_bytes

    @property
    def is_exceeded(self) -> bool:
        """See TokenLogs."""
        return self.held_bytes > self.limit_bytes

    def open(self, claim: Claim) -> NativeLog:
        """See TokenLogs."""
        name = parse_request_id(claim.request_id)
        head = orjson.dumps([claim.request_id, str(claim.epoch), claim.nonce])[1:-1] + b","
        digest, request_id = claim.digest.encode(), claim.request_id.encode()
        handle = check(
            self.library.logs_open(
                self.table,
                name.partition if name is not None else -1,
                claim.next_index,
                *(digest, len(digest), head, len(head), request_id, len(request_id)),
            )
        )
        return NativeLog(self, handle)

    def take(self, tokens: TokenColumns) -> None:
        """See TokenLogs."""
        count = tokens.num_tokens
        if not len(tokens.logs) // 8 == len(tokens.token_ids) // 4 == len(tokens.text_lengths) // 4:
            raise ValueError(f"expected {count} token ids and text lengths, got columns of other lengths")
        check(self.library.logs_take(self.table, count, *tokens, len(tokens.text)))

    def pending(self, limit: int, without: Collection[int] = ()) -> PendingLogs:
        """See TokenLogs."""
        found = self._pending
        excluded = array("q", without).tobytes()
        check(self.library.logs_pending(self.table, limit, excluded, len(without), ctypes.addressof(found)))
        others = _integers(found.others, found.num_others)
        if not found.num_logs:
            return PendingLogs((), others)
        logs, wake_ends = _integers(found.logs, found.num_logs), _integers(found.wake_ends, found.num_logs)
        wake_ups = ctypes.string_at(found.wake_ups, found.wake_bytes)
        batches, first, start = [], 0, 0
        for partition, count, end in zip(
            *(_integers(each, found.num_partitions) for each in (found.partitions, found.counts, found.values_ends)),
            strict=True,
        ):
            after = first + count
            values = ctypes.string_at(found.values + start, end - start)
            cut = wake_ends[first - 1] if first else 0
            appends = TokenAppends(
                partition,
                count,
                values,
                wake_ups[cut : wake_ends[after - 1]],
                wake_ends[first:after] if not cut else [each - cut for each in wake_ends[first:after]],
            )
            batches.append(TokenBatch(appends, logs[first:after]))
            first, start = after, end
        return PendingLogs(batches, others)

    def acknowledge(self, logs: Sequence[int], next_indexes: Sequence[int]) -> bool:
        """See TokenLogs."""
        if len(logs) != len(next_indexes):
            raise ValueError(f"expected an index for each of {len(logs)} logs, got {len(next_indexes)}")
        handles, indexes = array("q", logs).tobytes(), array("q", next_indexes).tobytes()
        more: int = self.library.logs_acknowledge(self.table, len(logs), handles, indexes)
        return more > 0


class NativeLog:
    """See TokenLog."""

    __slots__ = ("_library", "_logs", "handle")

    def __init__(self, logs: NativeLogs, handle: int) -> None:
        self._logs = logs
        self._library = logs.library
        self.handle = handle
        """See TokenLog."""

    @property
    def next_index(self) -> int:
        """See TokenLog."""
        return int(self._state().next_index)

    @property
    def num_taken(self) -> int:
        """See TokenLog."""
        return int(self._state().num_taken)

    @property
    def num_bytes(self) -> int:
        """See TokenLog."""
        return int(self._state().num_bytes)

    @property
    def has_pending(self) -> bool:
        """See TokenLog."""
        state = self._state()
        return bool(state.next_index < state.end_index)

    def write(self, kind: str, choice: str, value: str, text: str, extra: str | bytes = "") -> None:
        """See TokenLog."""
        is_bytes = isinstance(extra, bytes)
        parts = [each if isinstance(each, bytes) else each.encode() for each in (choice, value, text, extra)]
        sized = [each for part in parts for each in (part, len(part))]
        check(self._library.logs_write(self._logs.table, self.handle, kind.encode(), *sized, is_bytes))

    def pending(self, limit: int) -> tuple[Sequence[EntryValues], str]:
        """See TokenLog."""
        found = _Entries()
        check(self._library.logs_entries(self._logs.table, self.handle, limit, ctypes.addressof(found)))
        packed = ctypes.string_at(found.packed, found.num_bytes)
        return _unpacked(packed, found.count), found.previous[: found.previous_length].decode()

    def acknowledge(self, next_index: int) -> None:
        """See TokenLog."""
        self._logs.acknowledge((self.handle,), (next_index,))

    def can_send_from(self, next_index: int) -> bool:
        """See TokenLog."""
        state = self._state()
        return bool(state.first_kept <= next_index <= state.end_index)

    def drop_oldest(self) -> bool:
        """See TokenLog."""
        return bool(self._library.logs_drop_oldest(self._logs.table, self.handle))

    def close(self) -> None:
        """See TokenLog."""
        self._library.logs_close(self._logs.table, self.handle)

    def _state(self) -> _State:
        state = _State()
        check(self._library.logs_state(self._logs.table, self.handle, ctypes.addressof(state)))
        return state


def check(result: int) -> int:
    """Return a function's result; raise NativeLogError where it failed."""
    if result == _FAILED:
        raise NativeLogError(NativeLogError.__doc__)
    return result


def _integers(address: int | None, count: int) -> list[int]:
    return array("q", ctypes.string_at(address, count * 8)).tolist() if address else []


def _unpacked(packed: bytes, count: int) -> list[EntryValues]:
    entries, at = list[EntryValues](), 0
    for _ in range(count):
        *lengths, kind, is_bytes, digest = _HEADER.unpack_from(packed, at)
        at += _HEADER.size
        values = []
        for length in lengths:
            values.append(packed[at : at + length])
            at += length
        choice, value, text, extra = values
        strings = kind.decode(), choice.decode(), value.decode(), text.decode(), digest.decode()
        entries.append((*strings, extra if is_bytes else extra.decode()))
    return entries


FIRST_PYTHON_HANDLE = 1 << 62
"""Handles of the logs in Python begin here, far above those that C++ gives."""


class DividedLogs:
    """See TokenLogs.

    C++ takes all plain tokens of a step in one call. What is written entry by entry costs more there, a call for each,
    than in Python: log probabilities, and the tokens of several choices.

    Args:
        native: for plain tokens.
        limit_bytes: of all packed entries.
    """

    def __init__(self, native: NativeLogs, limit_bytes: int) -> None:
        self.native = native
        self._python = PythonLogs(limit_bytes, first_handle=FIRST_PYTHON_HANDLE)
        self.limit_bytes = limit_bytes
        """See TokenLogs."""

    @property
    def held_bytes(self) -> int:
        """See TokenLogs."""
        return self.native.held_bytes + self._python.held_bytes

    @property
    def is_exceeded(self) -> bool:
        """See TokenLogs."""
        return self.held_bytes > self.limit_bytes

    def open(self, claim: Claim) -> TokenLog:
        """See TokenLogs."""
        return self.native.open(claim) if has_plain_tokens(claim.spec) else self._python.open(claim)

    def take(self, tokens: TokenColumns) -> None:
        """See TokenLogs."""
        self.native.take(tokens)

    def pending(self, limit: int, without: Collection[int] = ()) -> PendingLogs:
        """See TokenLogs."""
        found = self.native.pending(limit, without)
        return PendingLogs(found.batches, [*found.others, *self._python.pending(limit, without).others])

    def acknowledge(self, logs: Sequence[int], next_indexes: Sequence[int]) -> bool:
        """See TokenLogs. Those of batches, which are all in C++."""
        return self.native.acknowledge(logs, next_indexes)


def open_logs(limit_bytes: int) -> TokenLogs:
    """Return logs whose packed entries take at most `limit_bytes`; all in Python where C++ can't be compiled here."""
    library = load_library()
    return PythonLogs(limit_bytes) if library is None else DividedLogs(NativeLogs(library, limit_bytes), limit_bytes)
