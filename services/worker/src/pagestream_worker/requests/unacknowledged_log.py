"""The log entries of one claim that this engine has written, kept until the log has its end."""

from collections.abc import Sequence

from pagestream.v1.records_pb2 import LogEntry
from pagestream_streams import Claim
from pagestream_streams.protocol import digests


class UnacknowledgedLog:
    """Entries from the claim's next index on, and how far Redis has acknowledged them.

    All are kept, so that they can be appended again from any index that the log asks for: after a lost reply, or
    after Redis has lost its last second.
    """

    def __init__(self, claim: Claim) -> None:
        self._entries: list[LogEntry] = []
        self._first_index = claim.next_index  # of self._entries[0]
        self._first_digest = claim.digest  # of the log before it
        self._digest = claim.digest
        self.next_index = claim.next_index
        """Index of the first entry that is not acknowledged."""

    @property
    def has_pending(self) -> bool:
        """Whether some entry has not been acknowledged."""
        return self.next_index < self._first_index + len(self._entries)

    def write(self, entry: LogEntry) -> None:
        """Add an entry, chained to the digest of those before it."""
        self._digest = entry.digest = digests.chain(self._digest, entry)
        self._entries.append(entry)

    def pending(self, limit: int) -> tuple[Sequence[LogEntry], str]:
        """Return the next entries to append, and the digest of the log before them.

        At most `limit` entries, or one more to keep a choice's last token and its finish together: an engine that
        resumed between the two would write the prompt's other choices first.
        """
        start = self.next_index - self._first_index
        end = start + limit
        if self._entries[end : end + 1] and self._entries[end].HasField("finish"):
            end += 1
        return self._entries[start:end], self._entries[start - 1].digest if start else self._first_digest

    def acknowledge(self, next_index: int) -> None:
        """Continue from the log's next index: ahead after an append, back after the log has lost entries."""
        self.next_index = next_index

    def can_send_from(self, next_index: int) -> bool:
        """Whether the entry that the log asks for is kept here."""
        return self._first_index <= next_index <= self._first_index + len(self._entries)
