"""One read of one log: its position, its verified digest, and the entries that wake-ups brought since.

What they bring while the consumer is busy waits packed, and bounded in bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from pagestream.v1.records_pb2 import LogEntry, LogSlice, RequestSpec

from pagestream_streams import fault_points
from pagestream_streams.errors import DigestMismatch, OffsetOutOfRange, StreamsError
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import chain
from pagestream_streams.tasks import ByteBudget

_ENTRY_BYTES = 64  # of an entry beside its values
_FIRST_PAGE_ENTRIES = 16  # of a log whose entries' size is not known yet
LARGE_BYTES = 2048  # of a batch, packed: it takes milliseconds to write

Sink = Callable[[Sequence[LogEntry]], bool]
"""Writes entries at once and returns True, or returns False and leaves them to the read's task. It never waits."""


class LogRead:
    """Yields entries in order, each once, and only if their digests continue those of the entries before.

    What wake-ups bring goes to the sink while the consumer waits for it. Else it waits for the consumer in `buffer`.
    Where that is full it is dropped, and the log is read instead.

    Methods: what wake-ups, polls and the consumer do to one position stands in one place.
    """

    def __init__(
        self,
        where: Partition,
        request_id: str,
        *,
        tenant: str,
        from_index: int,
        digest: str,
        limits: ReadLimits,
        spec: RequestSpec | None = None,
        sink: Sink | None = None,
        on_engine: Callable[[str], None] | None = None,
    ) -> None:
        """Create it; it reads the log first.

        Args:
            from_index: index of the first entry to yield.
            digest: digest of the log before `from_index`; "" for unknown.
            limits: bounds on what it keeps and yields.
            spec: the request to accept again if Redis has lost it.
            sink: what takes entries without waking the consumer's task, where it can.
            on_engine: see GatewaySession.read.
        """
        self.where = where
        self.spec = spec
        self.is_registered = False  # whether Redis has known the request since this read began
        self.is_recovered = False  # whether it was accepted again
        self._is_lost = False
        self.deadline: float | None = None  # time.monotonic(); None where the request has none, or none is known
        self.request_id = request_id
        self.tenant = tenant
        self.from_index = self.next_index = from_index
        self.ended = False
        self.failure: StreamsError | None = None
        self.waiting_since: float | None = None  # time.monotonic(); None while its consumer works
        self._suspected_at: int | None = None  # position at which its wake-ups may have been lost
        self.is_after_gap = False  # whether all may have been lost for a while
        self._digest = digest
        # Whether _digest is that of the log. If not, the first read includes the entry before.
        self._anchored = from_index == 0
        self._length: int | None = None  # of the finished log, if known before its end entry is taken
        self._log_read_requested = True
        self._limits = limits
        self.buffer = SliceBuffer(limits)
        self.taken_bytes = 0
        """Of the entries that were taken last, as they are packed."""
        self._entry_bytes = 0.0  # of an entry in the last page of the log
        self._is_woken = False
        self._waiter: asyncio.Future[None] | None = None
        self._sink = sink
        self._on_engine = on_engine

    @property
    def log_start(self) -> int:
        """Index from which the log has to be read."""
        return self.next_index if self._anchored else self.next_index - 1

    @property
    def page_entries(self) -> int:
        """Entries to read of the log at once."""
        if not self._entry_bytes:
            return min(_FIRST_PAGE_ENTRIES, self._limits.page_entries)
        return max(1, min(self._limits.page_entries, int(self._limits.batch_bytes / self._entry_bytes)))

    def begin(self, slices: Sequence[bytes] | None) -> None:
        """Note that the request was accepted here, which registered this read.

        `slices`: those of all entries that the log had until now; None where they are not known.
        """
        self.is_registered = True
        if slices is None:
            return
        self._log_read_requested = False
        for packed in slices:
            self.offer(packed)

    def offer(self, packed: bytes) -> None:
        """Buffer the LogSlice of a wake-up. Beyond the bounds, drop the buffer and read the log instead."""
        if self._log_read_requested:
            self._wake()
            return  # the log will be read, and has them
        if not self._anchored:
            # Before the first read, wake-ups only show that the log has reached the position.
            log_slice = LogSlice.FromString(packed)
            count = len(log_slice.entries)
            if not count or log_slice.first_index + count > self.next_index:
                self.request_log_read()
                return
        if self._pass_on(packed):
            return
        if self.buffer.append(packed):
            self._wake()
        else:
            self.request_log_read()

    def request_log_read(self) -> None:
        """Drop the buffer and read the log next."""
        self._suspected_at, self.is_after_gap = None, False
        self.buffer.clear()
        self._log_read_requested = True
        self._wake()

    def suspect_loss(self) -> None:
        """Note that wake-ups may have been lost: a poll that finds the log longer has it read."""
        self._suspected_at, self.is_after_gap = self.next_index, True

    def misses(self, length: int) -> bool:
        """Take the length of the log at a poll; return whether wake-ups seem to be lost, and it has to be read.

        They are where none has brought an entry since an earlier poll found the log longer. Those of a process that is
        late are on their way.
        """
        if length <= self.next_index:
            self._suspected_at, self.is_after_gap = None, False
            return False
        is_suspected, self._suspected_at = self._suspected_at == self.next_index, self.next_index
        return is_suspected

    def lose(self) -> None:
        """Note that Redis has lost the request."""
        self._is_lost = True
        self._wake()

    def take_loss(self) -> bool:
        """Return whether Redis has lost the request, and reset it."""
        is_lost, self._is_lost = self._is_lost, False
        return is_lost

    def fail(self, failure: StreamsError) -> None:
        """End the read with an error."""
        self.failure = failure
        self._wake()

    @property
    def is_open(self) -> bool:
        """Whether its log has not finished as far as is known: finished requests have no registered readers."""
        return not self.ended and self._length is None

    def end_at(self, next_index: int) -> None:
        """Note that the log has finished with `next_index` entries.

        Where none are left to take, the digest is still compared, also for a reader who has read them all: a log that
        lost its last entries may have ended otherwise.

        Raises:
            OffsetOutOfRange: the read began past the end.
            DigestMismatch: entries past the end were read: the log lost them, and ended otherwise.
        """
        if self.next_index > next_index:
            if self.is_recovered or self.next_index > self.from_index:
                raise DigestMismatch(self.request_id, self.next_index)
            raise OffsetOutOfRange(self.request_id, self.next_index, next_index)
        self._length = next_index
        if not self.ended:
            self._anchored = self.next_index == 0
        self.request_log_read()

    @property
    def exhausted(self) -> bool:
        """Whether it is at the end of a finished log, with a verified digest."""
        return self._anchored and self.next_index == self._length

    def take_log_read_request(self) -> bool:
        """Return whether the log has to be read, and reset it."""
        requested, self._log_read_requested = self._log_read_requested, False
        return requested

    def take_buffered(self) -> list[LogEntry]:
        """Return buffered entries that continue the position, of about `batch_bytes`. Others make it read the log."""
        taken: list[LogEntry] = []
        self.taken_bytes = 0
        while self.buffer and self._anchored and self.taken_bytes < self._limits.batch_bytes:
            packed = self.buffer.pop()
            self.taken_bytes += len(packed)
            if not self._take_slice(packed, taken):
                self.request_log_read()
        return taken

    def note_page(self, num_entries: int, num_bytes: int) -> None:
        """Note the size of a page's values, so that the next one has about `batch_bytes`."""
        self.taken_bytes = num_bytes
        if num_entries:
            self._entry_bytes = num_bytes / num_entries + _ENTRY_BYTES

    def take_logged(self, first_index: int, entries: Sequence[LogEntry]) -> list[LogEntry]:
        """Return the entries of a read from `first_index` that continue the position.

        DigestMismatch where the log differs from what was read before.
        """
        if not self._anchored and entries:
            if self._digest and self._digest != entries[0].digest:
                raise DigestMismatch(self.request_id, self.next_index)
            self._digest = entries[0].digest
            self._anchored = True
        taken: list[LogEntry] = []
        if not self._chain(entries[self.next_index - first_index :], taken):
            raise DigestMismatch(self.request_id, self.next_index)
        return taken

    async def wait(self, timeout_s: float) -> None:
        """Wait for anything new, at most `timeout_s` seconds."""
        if not self._is_woken:
            # A future and a timer: this runs once for each token, and asyncio.timeout costs three times as much.
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            self.waiting_since = time.monotonic()
            try:
                await self._waiter
            finally:
                timer.cancel()
                self.waiting_since = self._waiter = None
        self._is_woken = False

    def _pass_on(self, packed: bytes) -> bool:
        """Pass a slice to the sink; return whether it has taken it.

        Only while the consumer waits with nothing else to do, and only entries that plainly follow: anything unusual,
        and the log's end, is for the consumer's task.
        """
        waiter = self._waiter
        if self._sink is None or waiter is None or waiter.done() or self.buffer or len(packed) > LARGE_BYTES:
            return False
        log_slice = _parsed(packed)
        if log_slice is None or not self._continues(log_slice) or log_slice.entries[-1].HasField("end"):
            return False
        if fault_points.IS_ON:
            fault_points.reach(fault_points.FaultPoint.FORWARDING)
        self._note_engine(log_slice)
        try:
            if not self._sink(log_slice.entries):
                return False
        except Exception as error:  # noqa: BLE001 - it is the consumer's, whose task raises it
            waiter.set_exception(error)
            return True
        self._take(log_slice.entries)
        self.waiting_since = time.monotonic()
        return True

    def _wake(self) -> None:
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_slice(self, packed: bytes, taken: list[LogEntry]) -> bool:
        """Take a slice's entries; return whether they continue the position."""
        log_slice = _parsed(packed)
        if log_slice is None:
            return False
        skipped = self.next_index - log_slice.first_index
        if not log_slice.entries or skipped < 0:
            return False
        if self._continues(log_slice):
            self._take(log_slice.entries)
            taken.extend(log_slice.entries)
        elif not self._chain(log_slice.entries[skipped:], taken):
            return False
        self._note_engine(log_slice)
        return True

    def _continues(self, log_slice: LogSlice) -> bool:
        """Return whether a slice begins at the position, after the same entries."""
        return (
            log_slice.first_index == self.next_index
            and bool(log_slice.entries)
            and bool(self._digest)
            and log_slice.previous_digest == self._digest
            and not self.ended
        )

    def _note_engine(self, log_slice: LogSlice) -> None:
        if log_slice.fingerprint and self._on_engine is not None:
            self._on_engine(log_slice.fingerprint)

    def _take(self, entries: Sequence[LogEntry]) -> None:
        """Go on by entries that are known to continue the position."""
        last = entries[-1]
        self._digest = last.digest
        self.next_index += len(entries)
        self.ended = last.HasField("end")

    def _chain(self, entries: Sequence[LogEntry], taken: list[LogEntry]) -> bool:
        for entry in entries:
            if self.ended or chain(self._digest, entry) != entry.digest:
                return False
            self._digest = entry.digest
            self.next_index += 1
            self.ended = entry.HasField("end")
            taken.append(entry)
        return True


def _parsed(packed: bytes) -> LogSlice | None:
    try:
        return LogSlice.FromString(packed)
    except DecodeError:
        return None


_SLICE_BYTES = 64  # of a packed slice's object and its place in the buffer, beside its bytes


@dataclass(frozen=True)
class ReadLimits:
    """What one read may hold in memory."""

    buffer_bytes: int
    """Of wake-ups that wait for the consumer."""
    batch_bytes: int
    """Of the entries, as they are packed, that the consumer gets at once."""
    page_entries: int
    """Entries of one read of a log."""
    budget: ByteBudget
    """Of the buffers of all reads."""


class SliceBuffer:
    """A queue of packed LogSlices. Parsed entries would take four to ten times as much memory."""

    def __init__(self, limits: ReadLimits) -> None:
        """Create it empty."""
        self._limits = limits
        self._slices: deque[bytes] = deque()
        self.num_bytes = 0
        """Held, of this buffer's bound and of the budget of all."""

    def __bool__(self) -> bool:
        """Return whether anything waits."""
        return bool(self._slices)

    def append(self, packed: bytes) -> bool:
        """Add a slice; return False where there is no room for it."""
        num_bytes = len(packed) + _SLICE_BYTES
        if self.num_bytes + num_bytes > self._limits.buffer_bytes or not self._limits.budget.try_take(num_bytes):
            return False
        self._slices.append(packed)
        self.num_bytes += num_bytes
        return True

    def pop(self) -> bytes:
        """Remove the oldest slice."""
        packed = self._slices.popleft()
        self._free(len(packed) + _SLICE_BYTES)
        return packed

    def clear(self) -> None:
        """Remove all slices."""
        self._slices.clear()
        self._free(self.num_bytes)

    def _free(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._limits.budget.give(num_bytes)
