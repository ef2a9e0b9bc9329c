"""All reads of one gateway: their registration with Redis, the wake-ups, and the log where wake-ups fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED
from pagestream.v1.records_pb2 import LogEntry, RequestSpec, WakeUp

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.connection.scripts import POLL, REGISTER, UNREGISTER
from pagestream_streams.errors import DigestMismatch, OffsetOutOfRange, RequestNotFound, Unavailable
from pagestream_streams.fault_points import FaultPoint, reach
from pagestream_streams.gateway.follower import Follower
from pagestream_streams.gateway.reservations import renew, renewal_s
from pagestream_streams.protocol.entries import from_fields
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.tasks import Periodic, heed_cancellation

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_RETRY_PAUSE_S = 0.1
_LOOK_EVERY = 20  # heartbeats between two looks at the registrations themselves
_RENEW_AGAIN_S = 5.0
_LONGEST_WAIT_S = 5.0  # polls wake a reader; this is for the case that they don't run


class Readers:
    """Owned by a GatewaySession."""

    def __init__(
        self,
        broker: Broker,
        gateway_id: str,
        accept_again: Callable[[RequestSpec, bool], Awaitable[object]],
        *,
        serves: bool = True,
    ) -> None:
        """Starts nothing yet. `accept_again` accepts a lost request; its second argument: whether bounds count. Where
        it does not serve, it looks on: nothing is registered.
        """
        self._serves = serves
        self._broker = broker
        self._accept_again = accept_again
        self._settings = broker.settings
        self._gateway_id = gateway_id
        self._followers: defaultdict[str, list[Follower]] = defaultdict(list)
        self._leaving: dict[str, Partition] = {}
        self._expected: dict[str, tuple[Partition, float]] = {}  # accepted, not read yet; until when
        self._beats: defaultdict[Partition, int] = defaultdict(int)
        self._strangers: defaultdict[Partition, set[str]] = defaultdict(set)  # registered at the last look, not read
        self._away: dict[Partition, tuple[float, float]] = {}  # the first and the last poll without an answer
        self._closed = False
        self._renewed_at = time.monotonic()
        self._limit_s = 2 * self._settings.beat_limit_s  # a round must not wait for one node, or one lost connection
        self._keeper = Periodic("readers", self._settings.poll_ms / 4000, self._keep)

    def start(self) -> None:
        """Begins to poll for reads that wait."""
        self._keeper.start()

    async def stop(self) -> None:
        """Ends every read with Unavailable and takes their registrations back."""
        self._closed = True
        await self._keeper.stop()
        for followers in self._followers.values():
            for follower in followers:
                follower.fail(Unavailable("this gateway is closing"))
                self._leaving[follower.request_id] = follower.where
        self._leaving.update({request_id: where for request_id, (where, _) in self._expected.items()})
        if not self._serves:
            self._leaving.clear()
        try:
            await self._unregister()
        except Unavailable as error:
            _log.info("reads were not taken back, their grace starts when this gateway's lease ends: %s", error)

    def expect(self, where: Partition, request_id: str) -> None:
        """An accept registers this gateway; if no read follows, the registration is taken back."""
        if request_id in self._followers or not self._serves:
            return
        until = time.monotonic() + self._settings.accepted_unread_ms / 1000
        self._expected[request_id] = (where, until)

    def wake(self, message: bytes) -> None:
        """Hands the slices of a wake-up to their reads."""
        for log_slice in WakeUp.FromString(message).slices:
            for follower in self._followers.get(log_slice.request_id, ()):
                follower.offer(log_slice)

    def missed(self) -> None:
        """Wake-ups may have been lost: poll now."""
        for follower in self._all():
            if follower.waiting_since is not None:
                follower.waiting_since = float("-inf")
        self._keeper.nudge()

    def registered(self, where: Partition) -> dict[str, str]:
        """What should be registered in a partition: request id -> tenant of what is read and has not finished."""
        return {each.request_id: each.tenant for each in self._all() if each.where == where and each.is_open}

    async def compare(self, where: Partition, count: int) -> None:
        """Makes Redis' registrations in a partition equal to what is read here; called with each heartbeat.

        Some are missing when somebody took us for dead meanwhile. Some are too many when a script arrived after its
        caller had given up: such a request would never count as abandoned. `count` is what the heartbeat counted; the
        registrations themselves are looked at when it is wrong, and now and then. Unavailable.
        """
        self._beats[where] += 1
        if count == len(self.registered(where)) and self._beats[where] % _LOOK_EVERY:
            return
        key = where.reads(self._gateway_id)
        found = {each.decode() for each in await self._broker.connection.execute("SMEMBERS", key)}
        wanted = self.registered(where)
        missing = [(request_id, tenant) for request_id, tenant in wanted.items() if request_id not in found]
        await self._register_all(where, missing)
        strangers = found - wanted.keys() - self._expected.keys() - self._followers.keys()
        for request_id in strangers & self._strangers[where]:
            _log.warning("%s: nobody reads it here, but it is registered as read; that is taken back", request_id)
            self._leaving[request_id] = where
        self._strangers[where] = strangers

    async def read(
        self, request_id: str, *, tenant: str, from_index: int, digest: str, spec: RequestSpec | None
    ) -> AsyncGenerator[list[LogEntry], None]:
        """See GatewaySession.read."""
        where = await self._patiently(lambda: self._broker.directory.locate(request_id))
        follower = Follower(
            where,
            request_id,
            tenant=tenant,
            from_index=from_index,
            digest=digest,
            buffer_entries=self._settings.buffer_entries,
            spec=spec,
        )
        self._join(follower)
        try:
            await self._patiently(lambda: self._register(follower))
            while not follower.ended:
                entries = await self._next(follower)
                if entries:
                    reach(FaultPoint.FORWARDING)
                    yield entries
        finally:
            self._leave(follower)

    async def _next(self, follower: Follower) -> list[LogEntry]:
        while True:
            heed_cancellation()  # or a reader whose client has gone would wait for the end of the log
            if follower.failure is not None:
                raise follower.failure
            if follower.take_loss():
                await self._patiently(lambda: self._register(follower))
            entries = follower.take_buffered()
            if entries or follower.ended:
                return entries
            if follower.take_look():
                entries = await self._patiently(lambda: self._from_log(follower))
                follower.ended = follower.ended or follower.exhausted
                if entries or follower.ended:
                    return entries
            else:
                await follower.wait(_LONGEST_WAIT_S)

    async def _from_log(self, follower: Follower) -> list[LogEntry]:
        start, batch = follower.log_start, self._settings.read_batch
        log = follower.where.log(follower.request_id)
        rows = await self._broker.connection.read_acknowledged(
            follower.where.prefix, "XRANGE", log, f"{start + 1}-0", "+", "COUNT", batch
        )
        if len(rows) == batch:
            follower.look()
        return follower.take_logged(start, [from_fields(fields) for _, fields in rows])

    def _join(self, follower: Follower) -> None:
        self._expected.pop(follower.request_id, None)
        self._leaving.pop(follower.request_id, None)
        self._followers[follower.request_id].append(follower)

    def _leave(self, follower: Follower) -> None:
        remaining = self._followers[follower.request_id]
        remaining.remove(follower)
        if not remaining:
            del self._followers[follower.request_id]
            if not follower.ended and self._serves:
                self._leaving[follower.request_id] = follower.where
                self._keeper.nudge()

    async def _register(self, follower: Follower) -> None:
        who = [(follower.request_id, follower.tenant)]
        [reply] = await self._register_all(follower.where, who)
        if reply is None and follower.spec is not None:
            await self._recover(follower, follower.spec)
            [reply] = await self._register_all(follower.where, who)
        if reply is None:
            raise RequestNotFound(follower.request_id)
        follower.is_registered = True
        next_index, finished = reply
        if finished:
            self._check_end(follower, next_index)

    async def _recover(self, follower: Follower, spec: RequestSpec) -> None:
        """Redis has lost the request: it is accepted again, and what it generates is compared with what was read."""
        _log.warning("%s: Redis has lost it; it is accepted again", follower.request_id)
        follower.is_recovered = True
        try:
            # What was accepted once is exempt from bounds. That it was, a read that has just begun can't know.
            await self._accept_again(spec, not follower.is_registered)
        except RequestNotFound as error:
            if not follower.is_registered:
                raise
            raise Unavailable("Redis has lost the model; its engines publish it again") from error

    async def _register_all(self, where: Partition, reads: Iterable[tuple[str, str]]) -> list[list[int] | None]:
        if not self._serves:
            return [await self._looked_up(request_id, tenant) for request_id, tenant in reads]
        lease = self._settings.lease_ms
        calls = [
            Call(REGISTER, where.prefix, (request_id, tenant, self._gateway_id, lease)) for request_id, tenant in reads
        ]
        return await self._broker.connection.run_many(calls)

    async def _looked_up(self, request_id: str, tenant: str) -> list[int] | None:
        """What REGISTER answers, without a registration."""
        try:
            view = await self._broker.view(request_id, tenant)
        except RequestNotFound:
            return None
        return [view.next_index, int(view.state == REQUEST_STATE_FINISHED)]

    async def _keep(self) -> None:
        refused: Unavailable | None = None
        try:
            await self._unregister()
        except Unavailable as error:  # of a partition that is away; the reads of the others wait for their logs
            refused = error
        await self._poll()
        await self._renew_reservations()
        if refused is not None:
            raise refused

    async def _unregister(self) -> None:
        now = time.monotonic()
        for request_id in [each for each, (_, until) in self._expected.items() if until < now]:
            self._leaving[request_id], _ = self._expected.pop(request_id)
        leaving, self._leaving = self._leaving, {}
        by_partition = _grouped(leaving)
        calls = [
            Call(UNREGISTER, where.prefix, (self._gateway_id, *request_ids))
            for where, request_ids in by_partition.items()
        ]
        away = set(by_partition)
        try:
            replies = await self._broker.connection.run_each(calls, self._limit_s)
            away = {where for where, reply in zip(by_partition, replies, strict=True) if isinstance(reply, Unavailable)}
        finally:
            unread = {each: where for each, where in leaving.items() if where in away and each not in self._followers}
            self._leaving = unread | self._leaving
        for request_id, where in leaving.items():
            if where in away:
                continue
            # Somebody began to read while the script was on its way: its registration may have been the one that was
            # taken back.
            again = {(each.request_id, each.tenant) for each in self._followers.get(request_id, ())}
            if again:
                await self._register_all(where, again)

    async def _poll(self) -> None:
        limit = time.monotonic() - self._settings.poll_ms / 1000
        idle = [each for each in self._all() if each.waiting_since is not None and each.waiting_since < limit]
        by_partition: defaultdict[Partition, list[Follower]] = defaultdict(list)
        for follower in idle:
            by_partition[follower.where].append(follower)
        calls = [
            Call(POLL, where.prefix, [each.request_id for each in each_part])
            for where, each_part in by_partition.items()
        ]
        try:
            replies = await self._broker.connection.run_each(calls, self._limit_s)
        except Unavailable as error:
            replies = [error] * len(calls)
        now = time.monotonic()
        for (where, followers), reply in zip(by_partition.items(), replies, strict=True):
            if isinstance(reply, Unavailable):
                self._note_away(where, followers, reply)
                continue
            self._away.pop(where, None)
            for follower, next_index, finished in zip(followers, reply[::2], reply[1::2], strict=True):
                if follower.waiting_since is not None:
                    follower.waiting_since = now
                self._compare(follower, next_index, finished=bool(finished))

    async def _renew_reservations(self) -> None:
        retention_s, now = self._settings.retention_s, time.monotonic()
        if now - self._renewed_at < renewal_s(retention_s):
            return
        self._renewed_at += _RENEW_AGAIN_S  # where Redis refuses
        specs = [each.spec for each in self._all() if each.spec is not None]
        await renew(self._broker.connection, specs, retention_s, self._limit_s)
        self._renewed_at = now

    def _compare(self, follower: Follower, next_index: int, *, finished: bool) -> None:
        if next_index < 0 and follower.spec is not None:
            follower.lose()
        elif next_index < 0:
            follower.fail(RequestNotFound(follower.request_id))
        elif next_index > follower.next_index:
            follower.look()
        elif finished and not follower.ended:
            try:
                self._check_end(follower, next_index)
            except (OffsetOutOfRange, DigestMismatch) as error:
                follower.fail(error)

    def _check_end(self, follower: Follower, next_index: int) -> None:
        if follower.next_index > next_index:
            if follower.is_recovered or follower.next_index > follower.from_index:
                # It was read that far: the log lost entries, and ended otherwise.
                raise DigestMismatch(follower.request_id, follower.next_index)
            raise OffsetOutOfRange(follower.request_id, follower.next_index, next_index)
        follower.end_at(next_index)

    def _note_away(self, where: Partition, followers: list[Follower], error: Unavailable) -> None:
        now = time.monotonic()
        since, until = self._away.get(where, (now, now))
        if now - until > 2 * (_LONGEST_WAIT_S + self._settings.command_timeout_s):
            since = now  # whoever waited meanwhile was woken, or there was nobody
        self._away[where] = since, now
        if now - since > self._settings.outage_limit_s:
            for follower in followers:
                follower.fail(error)

    async def _patiently(self, operation: Callable[[], Awaitable[_T]]) -> _T:
        """Repeats what Redis can't do now until it can, or until the outage has lasted too long."""
        limit = time.monotonic() + self._settings.outage_limit_s
        while True:
            try:
                return await operation()
            except Unavailable:
                if self._closed or time.monotonic() > limit:
                    raise
                await asyncio.sleep(_RETRY_PAUSE_S)

    def _all(self) -> list[Follower]:
        return [follower for followers in self._followers.values() for follower in followers]


def _grouped(leaving: dict[str, Partition]) -> dict[Partition, list[str]]:
    groups: defaultdict[Partition, list[str]] = defaultdict(list)
    for request_id, where in leaving.items():
        groups[where].append(request_id)
    return groups
