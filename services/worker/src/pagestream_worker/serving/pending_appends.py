"""What the next round of appends sends."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from pagestream_streams import Append

from pagestream_worker.logs.base import PendingLogs


@dataclass(frozen=True, slots=True)
class PendingAppends:
    """The next append of each request with pending entries."""

    appends: Sequence[Append]
    """Of the requests that lack more than plain tokens."""
    logs: PendingLogs
    """All the logs; its batches are the other requests' appends."""

    @property
    def handles(self) -> list[int]:
        """Handles of all these logs."""
        return [*self.logs.others, *chain.from_iterable(batch.logs for batch in self.logs.batches)]
