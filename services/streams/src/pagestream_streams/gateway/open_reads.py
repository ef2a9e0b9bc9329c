"""The reads of a gateway, by request: those that are open, and those that its accepted requests are to get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pagestream_streams.gateway.follower import Follower
from pagestream_streams.protocol.keys import Partition

_EXPECTED_BYTES = 16 * 1024
"""Of the wake-ups that are kept for one expected read."""
_ALL_EXPECTED_BYTES = 8 * 1024 * 1024


class OpenReads:
    """A multimap from request ids to followers, indexed by partition: heartbeats ask for every partition.

    Several clients may read one request.
    """

    def __init__(self) -> None:
        """Create it empty."""
        self._followers: defaultdict[str, list[Follower]] = defaultdict(list)
        self._partitions: defaultdict[Partition, dict[Follower, None]] = defaultdict(dict)  # in the order of `add`

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request is read."""
        return request_id in self._followers

    def __iter__(self) -> Iterator[Follower]:
        """Iterate over a copy of all followers."""
        return iter([follower for followers in self._followers.values() for follower in followers])

    def of(self, request_id: str) -> Sequence[Follower]:
        """Return the followers of a request; () for none."""
        return self._followers.get(request_id, ())

    def add(self, follower: Follower) -> None:
        """Add a read."""
        self._followers[follower.request_id].append(follower)
        self._partitions[follower.where][follower] = None

    def remove(self, follower: Follower) -> bool:
        """Remove a read; return whether it was its request's last one."""
        remaining = self._followers[follower.request_id]
        remaining.remove(follower)
        del self._partitions[follower.where][follower]
        if not self._partitions[follower.where]:
            del self._partitions[follower.where]
        if remaining:
            return False
        del self._followers[follower.request_id]
        return True

    def unfinished(self, where: Partition) -> dict[str, str]:
        """Return what should be registered in a partition: request id -> tenant of reads whose log has not finished."""
        return {each.request_id: each.tenant for each in self._partitions.get(where, ()) if each.is_open}


@dataclass
class ExpectedRead:
    """The read that an accepted request is to get."""

    where: Partition
    tenant: str
    until: float
    """When it is not expected any more, as `time.monotonic()`."""
    accepted_at: float | None = None
    """When the accept was answered that registered it, likewise; None: it may not be registered."""
    is_doubtful: bool = False
    """Whether a registration of the request has been, or is being, taken back since it is expected."""
    slices: list[bytes] = field(default_factory=list)
    """Of the wake-ups since then, packed."""
    num_bytes: int = 0
    is_whole: bool = True
    """Whether these are all that its log has."""


class ExpectedReads:
    """Of a gateway. A read that begins has what came before, without asking Redis for it."""

    def __init__(self) -> None:
        """Create it empty."""
        self._expected: dict[str, ExpectedRead] = {}
        self.num_bytes = 0
        """Of the wake-ups that are kept for all of them."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over a copy of the ids."""
        return iter(list(self._expected))

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request is yet to be read."""
        return request_id in self._expected

    def slices(self, request_id: str) -> Sequence[bytes]:
        """Return the slices that are kept for a read."""
        read = self._expected.get(request_id)
        return read.slices if read is not None else ()

    def is_whole(self, request_id: str) -> bool:
        """Return whether a read has all of its log in what is kept for it."""
        read = self._expected.get(request_id)
        return read is not None and read.is_whole

    def expect(self, request_id: str, where: Partition, *, tenant: str, until: float) -> None:
        """Expect a read of a request that is being accepted."""
        read = self._expected.get(request_id)
        if read is None:
            self._expected[request_id] = ExpectedRead(where, tenant, until)
            return
        read.until = until
        self._drop(read)  # of two accepts, either may have been there before the other's wake-ups

    def note_accepted(self, request_id: str, now: float) -> None:
        """Note that an accept of a request that was not there has registered this gateway as its reader."""
        read = self._expected.get(request_id)
        if read is not None and not read.is_doubtful:
            read.accepted_at = now

    def doubt(self, request_id: str) -> None:
        """Note that a registration of a request is being taken back: whatever an accept says, it may be gone."""
        read = self._expected.get(request_id)
        if read is not None:
            read.is_doubtful, read.accepted_at = True, None

    def offer(self, request_id: str, packed: bytes) -> None:
        """Keep the slice of a wake-up for the read, as far as there is room."""
        read = self._expected.get(request_id)
        if read is None or not read.is_whole:
            return
        num_bytes = len(packed)
        if read.num_bytes + num_bytes > _EXPECTED_BYTES or self.num_bytes + num_bytes > _ALL_EXPECTED_BYTES:
            self._drop(read)
            return
        read.slices.append(packed)
        read.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def note_gap(self) -> None:
        """Note that wake-ups may have been lost."""
        for read in self._expected.values():
            self._drop(read)

    def overdue(self, now: float) -> list[str]:
        """Return the requests whose reads are not expected any more at a time, as `time.monotonic()`."""
        return [request_id for request_id, read in self._expected.items() if read.until < now]

    def take(self, request_id: str, tenant: str | None = None) -> ExpectedRead | None:
        """Return an expected read, unless it is another tenant's, and expect it no longer."""
        read = self._expected.get(request_id)
        if read is None or (tenant is not None and read.tenant != tenant):
            return None
        del self._expected[request_id]
        self.num_bytes -= read.num_bytes
        return read

    def _drop(self, read: ExpectedRead) -> None:
        self.num_bytes -= read.num_bytes
        read.slices, read.num_bytes, read.is_whole = [], 0, False
