"""The log entries of one claim that this engine has written, as far back as its memory for them reaches."""

import marshal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_streams import Claim
from pagestream_streams.protocol import digests
from pagestream_streams.protocol.entries import FINISH, EntryValues

PACKED_ENTRIES = 16
"""Entries of a packed part. At most twice as many of a log are objects, which take four to ten times as much."""

_PART_BYTES = 128  # of a part's objects, beside its bytes


@dataclass
class LogMemory:
    """What the packed entries of all logs of a process take, against its limit."""

    limit_bytes: int
    held_bytes: int = 0

    @property
    def is_exceeded(self) -> bool:
        """Whether some of them must go."""
        return self.held_bytes > self.limit_bytes


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


class UnacknowledgedLog:
    """Entries from the claim's next index on, and how far Redis has acknowledged them.

    Acknowledged ones are kept too, so that they can be appended again from any index that the log asks for: after a
    lost reply, or after Redis has lost its last seconds. They are the first to go where memory is short. A log that
    then asks for them is handed back, and generated again from there.
    """

    __slots__ = (
        "_digest",
        "_entries",
        "_entries_digest",
        "_entries_index",
        "_memory",
        "_parts",
        "next_index",
        "num_bytes",
    )

    def __init__(self, claim: Claim, memory: LogMemory) -> None:
        self._memory = memory
        self._parts: deque[_Part] = deque()
        self._entries: list[EntryValues] = []  # after those in parts
        self._entries_index = claim.next_index  # of self._entries[0]
        self._entries_digest = claim.digest  # of the log before it
        self._digest = claim.digest
        self.next_index = claim.next_index
        """Index of the first entry that is not acknowledged."""
        self.num_bytes = 0
        """What its packed entries take."""

    @property
    def has_pending(self) -> bool:
        """Whether some entry has not been acknowledged."""
        return self.next_index < self._entries_index + len(self._entries)

    def write(self, kind: str, choice: str, value: str, text: str, extra: str | bytes = "") -> None:
        """Add an entry with these values (see EntryValues), chained to the digest of those before it."""
        digest = self._digest = digests.chain_values(self._digest, kind, choice, value)
        self._entries.append((kind, choice, value, text, digest, extra))
        if len(self._entries) >= 2 * PACKED_ENTRIES:
            self._pack()

    def pending(self, limit: int) -> tuple[Sequence[EntryValues], str]:
        """Return the next entries to append, and the digest of the log before them.

        At most `limit` entries, or one more to keep a choice's last token and its finish together: an engine that
        resumed between the two would write the prompt's other choices first.
        """
        entries, digest, start = self._entries, self._entries_digest, self.next_index - self._entries_index
        if start < 0:
            entries, digest, start = self._from_parts(self.next_index, limit + 1)
        end = start + limit
        if len(entries) > end and entries[end][0] == FINISH:
            end += 1
        return entries[start:end], entries[start - 1][4] if start else digest

    def acknowledge(self, next_index: int) -> None:
        """Continue from the log's next index: ahead after an append, back after the log has lost entries."""
        self.next_index = next_index

    def can_send_from(self, next_index: int) -> bool:
        """Whether the entry that the log asks for is kept here."""
        first_index = self._parts[0].first_index if self._parts else self._entries_index
        return first_index <= next_index <= self._entries_index + len(self._entries)

    def drop_oldest(self) -> bool:
        """Drop the oldest packed entries; return False where none of them is acknowledged."""
        end = self._parts[1].first_index if len(self._parts) > 1 else self._entries_index
        if not self._parts or end > self.next_index:
            return False
        self._hold(-self._parts.popleft().num_bytes)
        return True

    def close(self) -> None:
        """Give its memory back: the request is no longer this engine's."""
        self._parts.clear()
        self._hold(-self.num_bytes)

    def _hold(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._memory.held_bytes += num_bytes

    def _pack(self) -> None:
        packed = marshal.dumps(self._entries[:PACKED_ENTRIES])
        part = _Part(self._entries_index, self._entries_digest, packed)
        self._parts.append(part)
        self._hold(part.num_bytes)
        self._entries_digest = self._entries[PACKED_ENTRIES - 1][4]
        self._entries_index += PACKED_ENTRIES
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
