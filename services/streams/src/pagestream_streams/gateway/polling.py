"""Poll the lengths of logs for reads whose wake-ups may have been lost."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from random import shuffle

from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.errors import DigestMismatch, OffsetOutOfRange, RequestNotFound, Unavailable
from pagestream_streams.gateway.follower import Follower
from pagestream_streams.gateway.open_reads import OpenReads
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.scripts import POLL
from pagestream_streams.settings import StreamsSettings

LONGEST_WAIT_S = 5.0
"""Longest wait of a follower for a wake-up or a poll, in case the polls have stopped."""
_READS_OF_A_ROUND = 32
"""Logs to read for wake-ups that seem to be lost. Reads of thousands would make a process that is late later still."""


class Poller:
    """Compares followers that wait with their logs, and ends reads of partitions that stay unreachable."""

    def __init__(self, connection: Connection, settings: StreamsSettings, reads: OpenReads, limit_s: float) -> None:
        """`limit_s`: seconds that a round may wait for one partition's node."""
        self._connection = connection
        self._settings = settings
        self._reads = reads
        self._limit_s = limit_s
        self._away: dict[Partition, tuple[float, float]] = {}  # the first and the last poll without an answer

    @property
    def partitions_away(self) -> frozenset[Partition]:
        """Partitions whose last poll was not answered."""
        return frozenset(self._away)

    async def poll(self) -> None:
        """Ask for the logs of the followers that have waited for settings.poll_ms."""
        limit = time.monotonic() - self._settings.poll_ms / 1000
        by_partition: defaultdict[Partition, list[Follower]] = defaultdict(list)
        for follower in self._reads:
            if follower.waiting_since is not None and follower.waiting_since < limit:
                by_partition[follower.where].append(follower)
        calls = [
            Call(POLL, where.prefix, [each.request_id for each in followers])
            for where, followers in by_partition.items()
        ]
        try:
            replies = await self._connection.run_each(calls, self._limit_s)
        except Unavailable as error:
            replies = [error] * len(calls)
        now, missing = time.monotonic(), list[Follower]()
        for (where, followers), reply in zip(by_partition.items(), replies, strict=True):
            if isinstance(reply, Unavailable):
                self._note_away(where, followers, reply)
                continue
            self._away.pop(where, None)
            for follower, next_index, finished in zip(followers, reply[::2], reply[1::2], strict=True):
                if follower.waiting_since is not None:
                    follower.waiting_since = now
                if _compare(follower, next_index, finished=bool(finished)):
                    missing.append(follower)
        shuffle(missing)
        for follower in missing[:_READS_OF_A_ROUND]:
            follower.request_log_read()

    def _note_away(self, where: Partition, followers: Sequence[Follower], error: Unavailable) -> None:
        now = time.monotonic()
        since, until = self._away.get(where, (now, now))
        if now - until > 2 * (LONGEST_WAIT_S + self._settings.command_timeout_s):
            since = now  # not polled meanwhile: no follower has waited, or all were woken
        self._away[where] = since, now
        if now - since > self._settings.outage_limit_s:
            for follower in followers:
                follower.fail(error)


def _compare(follower: Follower, next_index: int, *, finished: bool) -> bool:
    """Act on the length of a follower's log, -1 where Redis does not know the request.

    Return whether it has to be read, but need not be now.
    """
    if next_index < 0 and follower.spec is not None:
        follower.lose()
    elif next_index < 0:
        follower.fail(RequestNotFound(follower.request_id))
    elif next_index > follower.next_index:
        if follower.misses(next_index):
            if not follower.is_after_gap:
                return True
            follower.request_log_read()
    elif finished and not follower.ended:
        try:
            follower.end_at(next_index)
        except (OffsetOutOfRange, DigestMismatch) as error:
            follower.fail(error)
    return False
