"""What wake-ups brought for one read while its consumer was busy: packed, and bounded in bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pagestream_streams.tasks import ByteBudget

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
