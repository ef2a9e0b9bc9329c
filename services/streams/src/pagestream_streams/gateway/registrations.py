"""A gateway's registrations in Redis as a reader of requests: they keep disconnect graces from starting."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable

from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.errors import RequestNotFound, Unavailable
from pagestream_streams.gateway.follower import Follower
from pagestream_streams.gateway.open_reads import ExpectedRead, ExpectedReads, OpenReads
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.scripts import REGISTER, UNREGISTER

_log = logging.getLogger(__name__)

_COMPARE_EVERY = 20  # heartbeats between two comparisons where the counts agree


class Registrations:
    """Registers reads, and takes registrations back when the last read of a request ends."""

    def __init__(self, broker: Broker, gateway_id: str, reads: OpenReads, limit_s: float, *, serves: bool) -> None:
        """Create it; nothing is sent yet.

        `limit_s`: seconds that a round may wait for one partition's node. Without `serves` nothing is registered.
        """
        self._broker = broker
        self._settings = broker.settings
        self._gateway_id = gateway_id
        self._reads = reads
        self._limit_s = limit_s
        self._serves = serves
        self._leaving: dict[str, Partition] = {}
        self._unregistering: frozenset[str] = frozenset()  # whose registration is being taken back
        self.awaited = ExpectedReads()
        """Of accepted requests that were not read yet."""
        self._beats: defaultdict[Partition, int] = defaultdict(int)
        self._strays: defaultdict[Partition, set[str]] = defaultdict(set)  # registered at the last look, not read

    @property
    def expected(self) -> frozenset[str]:
        """Ids of accepted requests that were not read yet."""
        return frozenset(self.awaited)

    @property
    def leaving(self) -> frozenset[str]:
        """Ids of requests whose registration is to be taken back."""
        return frozenset(self._leaving)

    def expect(self, where: Partition, request_id: str, tenant: str) -> None:
        """Note that an accept registers this gateway; without a read in time, the registration is taken back."""
        if request_id in self._reads or not self._serves:
            return
        self._leaving.pop(request_id, None)
        until = time.monotonic() + self._settings.accepted_unread_ms / 1000
        self.awaited.expect(request_id, where, tenant=tenant, until=until)
        if request_id in self._unregistering:
            self.awaited.doubt(request_id)

    def keep(self, request_id: str, tenant: str) -> ExpectedRead | None:
        """Keep a registration: a tenant's read of the request begins. Returns what an accept has left for it."""
        self._leaving.pop(request_id, None)
        return self.awaited.take(request_id, tenant)

    def leave(self, where: Partition, request_id: str) -> None:
        """Have a registration taken back by the next `unregister`."""
        if self._serves:
            self._leaving[request_id] = where

    def leave_all(self) -> None:
        """Have every registration taken back by the next `unregister`."""
        for follower in self._reads:
            self.leave(follower.where, follower.request_id)
        for request_id in self.awaited:
            self._give_up(request_id)

    async def register(self, follower: Follower) -> list[int] | None:
        """Register a read. Unavailable.

        Returns:
            The log's length, 1 where it has finished, else 0, and the ms until its deadline, 0 for none; None where
            Redis knows no such request of the tenant.
        """
        [reply] = await self._register_all(follower.where, [(follower.request_id, follower.tenant)])
        return reply

    async def unregister(self) -> None:
        """Take back the registrations of requests that are no longer read. Unavailable."""
        now = time.monotonic()
        for request_id in self.awaited.overdue(now):
            self._give_up(request_id)
        leaving, self._leaving = self._leaving, {}
        self._unregistering = frozenset(leaving)
        for request_id in leaving:
            self.awaited.doubt(request_id)
        by_partition: defaultdict[Partition, list[str]] = defaultdict(list)
        for request_id, where in leaving.items():
            by_partition[where].append(request_id)
        calls = [
            Call(UNREGISTER, where.prefix, (self._gateway_id, *request_ids))
            for where, request_ids in by_partition.items()
        ]
        away = set(by_partition)
        try:
            replies = await self._broker.connection.run_each(calls, self._limit_s)
            away = {where for where, reply in zip(by_partition, replies, strict=True) if isinstance(reply, Unavailable)}
        finally:
            self._unregistering = frozenset()
            unread = {
                each: where
                for each, where in leaving.items()
                if where in away and each not in self._reads and each not in self.awaited
            }
            self._leaving = unread | self._leaving
        for request_id, where in leaving.items():
            if where in away:
                continue
            # A read that began while the script was in flight may have lost its registration to it.
            again = {(each.request_id, each.tenant) for each in self._reads.of(request_id)}
            if again:
                await self._register_all(where, again)

    async def compare(self, where: Partition, count: int) -> None:
        """Make Redis' registrations in a partition equal to the reads that are open here. Unavailable.

        Called with each heartbeat, with the number of registrations that it counted; they are read where that is wrong,
        and at every 20th heartbeat, not of all partitions at once. Some are missing when this gateway was taken for
        dead meanwhile. Some are too many when a script arrived after its caller had given up: such a request would
        never count as abandoned.
        """
        self._beats[where] += 1
        is_turn = (self._beats[where] + where.number) % _COMPARE_EVERY == 0
        if count == len(self._reads.unfinished(where)) and not is_turn:
            return
        key = where.reads(self._gateway_id)
        found = {each.decode() for each in await self._broker.connection.execute("SMEMBERS", key)}
        wanted = self._reads.unfinished(where)
        missing = [(request_id, tenant) for request_id, tenant in wanted.items() if request_id not in found]
        await self._register_all(where, missing)
        strays = {each for each in found - wanted.keys() if each not in self._reads and each not in self.awaited}
        for request_id in strays & self._strays[where]:
            _log.warning("%s: registered as read by this gateway, but no read is open; unregisters it", request_id)
            self._leaving[request_id] = where
        self._strays[where] = strays

    def _give_up(self, request_id: str) -> None:
        read = self.awaited.take(request_id)
        if read is not None:
            self.leave(read.where, request_id)

    async def _register_all(self, where: Partition, reads: Iterable[tuple[str, str]]) -> list[list[int] | None]:
        if not self._serves:
            return [await self._looked_up(request_id, tenant) for request_id, tenant in reads]
        lease = self._settings.lease_ms
        calls = [
            Call(REGISTER, where.prefix, (request_id, tenant, self._gateway_id, lease)) for request_id, tenant in reads
        ]
        return await self._broker.connection.run_many(calls)

    async def _looked_up(self, request_id: str, tenant: str) -> list[int] | None:
        """Return what REGISTER would, without a registration."""
        try:
            view = await self._broker.view(request_id, tenant, with_position=False)
        except RequestNotFound:
            return None
        return [view.next_index, int(view.state == REQUEST_STATE_FINISHED), 0]
