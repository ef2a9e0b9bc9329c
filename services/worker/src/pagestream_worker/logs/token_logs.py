"""The logs of the claimed requests: entries that Redis lacks, or may ask for again.

`TokenLogs` and `TokenLog` say what they do. `PythonLogs` are what every append is defined by, and serve where C++ can't
be compiled: each log keeps its last entries as tuples, and packs those before them. `NativeLogs` (token_logs.cpp) give
the same bytes. `open_logs` chooses.
"""

from __future__ import annotations

import ctypes
import marshal
import struct
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import orjson
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_engine.wire.worker import TokenColumns
from pagestream_streams import Claim
from pagestream_streams.protocol.keys import parse_request_id
from pagestream_streams.protocol.records import (
    END,
    FINISH,
    TOKEN,
    EntryValues,
    TokenAppends,
    chain_values,
    is_prompt_alone,
)

from pagestream_worker.logs.library import load_library

PACKED_ENTRIES = 16
"""Entries of a part, the unit in which acknowledged entries are dropped."""


def open_logs(limit_bytes: int) -> TokenLogs:
    """Return logs whose packed entries take at most `limit_bytes`; all in Python where C++ can't be compiled here."""
    library = load_library()
    return PythonLogs(limit_bytes) if library is None else NativeLogs(library, limit_bytes)


def has_plain_tokens(spec: RequestSpec) -> bool:
    """Whether an output of a request between its first and its last one is nothing but a token of choice 0, which
    `TokenLogs.write_tokens` writes.
    """
    sampling = spec.sampling
    comes_at_end = sampling.use_beam_search or sampling.HasField("best_of") or is_prompt_alone(spec)
    has_logprobs = sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs")
    return len(spec.prompts) == 1 and sampling.n <= 1 and not has_logprobs and not comes_at_end


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The next appends of logs that lack nothing but plain tokens."""

    appends: TokenAppends
    logs: Sequence[int]
    """Their handles, in the order of the appends."""


@dataclass(frozen=True, slots=True)
class PendingLogs:
    """What the logs lack in Redis."""

    batches: Sequence[TokenBatch]
    """One for each partition."""
    others: Sequence[int]
    """Handles of the logs with other pending entries: `TokenLog.pending` returns them."""


class TokenLog(Protocol):
    """Entries of one claim's log from its next index on, and how far Redis has acknowledged them.

    Acknowledged ones are kept too, so that they can be appended again from any index that the log asks for: after a
    lost reply, or after Redis has lost its last seconds. They are the first to go where memory is short. A log that
    then asks for them is handed back, and generated again from there.
    """

    @property
    def handle(self) -> int:
        """Names it among the logs of this process, for ever; above 0."""

    @property
    def next_index(self) -> int:
        """Index of the first entry that is not acknowledged."""

    @property
    def num_taken(self) -> int:
        """Tokens that `TokenLogs.write_tokens` has written."""

    @property
    def num_bytes(self) -> int:
        """What its packed entries take."""

    @property
    def has_pending(self) -> bool:
        """Whether some entry has not been acknowledged."""

    def write(self, kind: str, choice: str, value: str, text: str, extra: str | bytes = "") -> None:
        """Add an entry with these values (see EntryValues), chained to the digest of those before it."""

    def pending(self, limit: int) -> tuple[Sequence[EntryValues], str]:
        """Return the next entries to append, and the digest of the log before them.

        At most `limit` entries, or one more to keep a choice's last token and its finish together: an engine that
        resumed between the two would write the prompt's other choices first.
        """

    def acknowledge(self, next_index: int) -> None:
        """Continue from the log's next index: ahead after an append, back after the log has lost entries."""

    def can_send_from(self, next_index: int) -> bool:
        """Whether the entry that the log asks for is kept here."""

    def drop_oldest(self) -> bool:
        """Drop the oldest packed entries; return False where none of them is acknowledged."""

    def close(self) -> None:
        """Give its memory back: the request is no longer this engine's."""


class TokenLogs(Protocol):
    """The logs of a process. For one thread."""

    limit_bytes: int
    """Most that the packed entries of all logs may take."""

    @property
    def held_bytes(self) -> int:
        """What the packed entries of all logs take."""

    @property
    def is_exceeded(self) -> bool:
        """Whether that is more than the limit, so that some of them must go."""

    def open(self, claim: Claim) -> TokenLog:
        """Return the log of a claim, without entries."""

    def write_tokens(self, tokens: TokenColumns) -> None:
        """Write plain tokens of choice 0, each to its log; those of logs that were closed or have ended are ignored."""

    def pending(self, limit: int, without: Collection[int] = ()) -> PendingLogs:
        """Return the next append of each log with pending entries.

        Args:
            limit: most entries of one log.
            without: handles of logs to leave out.
        """

    def acknowledge(self, logs: Sequence[int], next_indexes: Sequence[int]) -> bool:
        """`TokenLog.acknowledge` for many; closed ones are ignored. Return whether one of them has more pending."""


_PART_BYTES = 128  # of a part's objects, beside its bytes


@dataclass(frozen=True, slots=True)
class _Part:
    first_index: int
    previous_digest: str
    packed: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.packed) + _PART_BYTES

    def entries(self) -> list[EntryValues]:
        entries: list[EntryValues] = marshal.loads(self.packed)  # noqa: S302 - this process packed it
        return entries


class PythonLogs:
    """See TokenLogs.

    Args:
        limit_bytes: of all packed entries.
        first_handle: above 0.
    """

    def __init__(self, limit_bytes: int, *, first_handle: int = 1) -> None:
        self.held_bytes = 0
        """See TokenLogs."""
        self.limit_bytes = limit_bytes
        """See TokenLogs."""
        self.logs: dict[int, PythonLog] = {}
        """By handle."""
        self._handles = count(first_handle)

    @property
    def is_exceeded(self) -> bool:
        """See TokenLogs."""
        return self.held_bytes > self.limit_bytes

    def open(self, claim: Claim) -> PythonLog:
        """See TokenLogs."""
        log = PythonLog(self, next(self._handles), claim)
        self.logs[log.handle] = log
        return log

    def write_tokens(self, tokens: TokenColumns) -> None:
        """See TokenLogs."""
        for handle, token_id, text in tokens.rows():
            log = self.logs.get(handle)
            if log is not None and not log.has_finish:
                log.write(TOKEN, "0", str(token_id), text)
                log.num_taken += 1

    def pending(self, limit: int, without: Collection[int] = ()) -> PendingLogs:
        """See TokenLogs. Each log's are among `others`."""
        left_out = frozenset(without)
        return PendingLogs(
            (), [handle for handle, log in self.logs.items() if log.has_pending and handle not in left_out]
        )

    def acknowledge(self, logs: Sequence[int], next_indexes: Sequence[int]) -> bool:
        """See TokenLogs."""
        found = [
            (self.logs[handle], index) for handle, index in zip(logs, next_indexes, strict=True) if handle in self.logs
        ]
        for log, next_index in found:
            log.acknowledge(next_index)
        return any(log.has_pending for log, _ in found)

    def hold(self, num_bytes: int) -> None:
        """Count the bytes of packed entries that were added, or dropped (negative)."""
        self.held_bytes += num_bytes

    def forget(self, handle: int) -> None:
        """Remove a closed log."""
        self.logs.pop(handle, None)


class PythonLog:
    """See TokenLog. At most 2 * PACKED_ENTRIES entries are objects, which take four to ten times as much as packed."""

    __slots__ = (
        "_digest",
        "_entries",
        "_entries_digest",
        "_logs",
        "_parts",
        "handle",
        "has_finish",
        "next_index",
        "num_bytes",
        "num_taken",
        "tail_index",
    )

    def __init__(self, logs: PythonLogs, handle: int, claim: Claim) -> None:
        self._logs = logs
        self._parts: deque[_Part] = deque()
        self._entries: list[EntryValues] = []  # after those in parts
        self.tail_index = claim.next_index  # of self._entries[0]
        self._entries_digest = claim.digest  # of the log before it
        self._digest = claim.digest
        self.handle = handle
        """See TokenLog."""
        self.next_index = claim.next_index
        """See TokenLog."""
        self.num_bytes = 0
        """See TokenLog."""
        self.num_taken = 0
        """See TokenLog."""
        self.has_finish = False
        """Whether a finish or the end was written."""

    @property
    def has_pending(self) -> bool:
        """See TokenLog."""
        return self.next_index < self.tail_index + len(self._entries)

    def write(self, kind: str, choice: str, value: str, text: str, extra: str | bytes = "") -> None:
        """See TokenLog."""
        digest = self._digest = chain_values(self._digest, kind, choice, value)
        self._entries.append((kind, choice, value, text, digest, extra))
        if kind in (FINISH, END):
            self.has_finish = True
        if len(self._entries) >= 2 * PACKED_ENTRIES:
            self._pack()

    def pending(self, limit: int) -> tuple[Sequence[EntryValues], str]:
        """See TokenLog."""
        entries, digest, start = self._entries, self._entries_digest, self.next_index - self.tail_index
        if start < 0:
            entries, digest, start = self._from_parts(self.next_index, limit + 1)
        end = start + limit
        if len(entries) > end and entries[end][0] == FINISH:
            end += 1
        return entries[start:end], entries[start - 1][4] if start else digest

    def acknowledge(self, next_index: int) -> None:
        """See TokenLog."""
        self.next_index = next_index

    def can_send_from(self, next_index: int) -> bool:
        """See TokenLog."""
        first_index = self._parts[0].first_index if self._parts else self.tail_index
        return first_index <= next_index <= self.tail_index + len(self._entries)

    def drop_oldest(self) -> bool:
        """See TokenLog."""
        end = self._parts[1].first_index if len(self._parts) > 1 else self.tail_index
        if not self._parts or end > self.next_index:
            return False
        self._hold(-self._parts.popleft().num_bytes)
        return True

    def close(self) -> None:
        """See TokenLog."""
        self._parts.clear()
        self._hold(-self.num_bytes)
        self._logs.forget(self.handle)

    def _hold(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._logs.hold(num_bytes)

    def _pack(self) -> None:
        packed = marshal.dumps(self._entries[:PACKED_ENTRIES])
        part = _Part(self.tail_index, self._entries_digest, packed)
        self._parts.append(part)
        self._hold(part.num_bytes)
        self._entries_digest = self._entries[PACKED_ENTRIES - 1][4]
        self.tail_index += PACKED_ENTRIES
        del self._entries[:PACKED_ENTRIES]

    def _from_parts(self, index: int, count: int) -> tuple[list[EntryValues], str, int]:
        """Return entries that hold `count` from `index` on, as far as there are so many, where `index` is in a part.

        After them the digest of the log before the first one, and the place of `index` in them.
        """
        parts = [part for part in self._parts if part.first_index > index - PACKED_ENTRIES]
        needed = [part for part in parts if part.first_index < index + count]
        entries = [entry for part in needed for entry in part.entries()]
        if len(needed) == len(parts):
            entries += self._entries
        return entries, needed[0].previous_digest, index - needed[0].first_index


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
        *((name, _P) for name in ("logs", "wake_ends", "ends", "partitions", "counts", "values_ends", "others")),
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


FIRST_PYTHON_HANDLE = 1 << 62
"""Handles of the logs in Python begin here, far above those that C++ gives."""


class NativeLogs:
    """See TokenLogs. One call for the plain tokens of a step, and one for all their appends.

    What is written entry by entry, log probabilities and the tokens of several choices, costs 25 to 37 us an entry
    in C++, which is called for each, and 3 us in Python: the logs of such requests are Python's.

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
        self._python = PythonLogs(limit_bytes, first_handle=FIRST_PYTHON_HANDLE)

    def __del__(self) -> None:
        if self.table is not None:
            self.library.logs_delete(self.table)

    @property
    def held_bytes(self) -> int:
        """See TokenLogs."""
        num_bytes: int = self.library.logs_held_bytes(self.table)
        return num_bytes + self._python.held_bytes

    @property
    def is_exceeded(self) -> bool:
        """See TokenLogs."""
        return self.held_bytes > self.limit_bytes

    def open(self, claim: Claim) -> TokenLog:
        """See TokenLogs."""
        if not has_plain_tokens(claim.spec):
            return self._python.open(claim)
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

    def write_tokens(self, tokens: TokenColumns) -> None:
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
        if self._python.logs:
            others += self._python.pending(limit, without).others
        if not found.num_logs:
            return PendingLogs((), others)
        logs, wake_ends, ends = (_integers(each, found.num_logs) for each in (found.logs, found.wake_ends, found.ends))
        wake_ups = ctypes.string_at(found.wake_ups, found.wake_bytes)
        batches, first, start = [], 0, 0
        for partition, num_logs, end in zip(
            *(_integers(each, found.num_partitions) for each in (found.partitions, found.counts, found.values_ends)),
            strict=True,
        ):
            after = first + num_logs
            values = ctypes.string_at(found.values + start, end - start)
            cut = wake_ends[first - 1] if first else 0
            appends = TokenAppends(
                partition,
                num_logs,
                values,
                ends[first:after],
                wake_ups[cut : wake_ends[after - 1]],
                wake_ends[first:after] if not cut else [each - cut for each in wake_ends[first:after]],
            )
            batches.append(TokenBatch(appends, logs[first:after]))
            first, start = after, end
        return PendingLogs(batches, others)

    def acknowledge(self, logs: Sequence[int], next_indexes: Sequence[int]) -> bool:
        """See TokenLogs. Those of batches, which are all in C++."""
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
