"""The reads that are open in a gateway, by request. Several clients may read one request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pagestream_streams.gateway.follower import Follower
from pagestream_streams.protocol.keys import Partition


class OpenReads:
    """A multimap from request ids to followers, indexed by partition: heartbeats ask for every partition."""

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
