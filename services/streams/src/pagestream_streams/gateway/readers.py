"""All reads of one gateway: entries from wake-ups, and from the log where wake-ups fail.

`Readers` serve them. Those that are open, and those that accepted requests are to get, are registered in Redis, which
keeps disconnect graces from starting. The lengths of logs are polled for reads whose wake-ups may have been lost. A
`LogRead` is one of them: its position, its verified digest, and the entries that wake-ups brought since. What they
bring while the consumer is busy waits packed, and bounded in bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import shuffle
from typing import TypeVar

from google.protobuf.message import DecodeError
from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED
from pagestream.v1.records_pb2 import LogEntry, LogSlice, PackedWakeUp, RequestSpec

from pagestream_streams import fault_points
from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.errors import (
    DigestMismatch,
    ModelNotFound,
    OffsetOutOfRange,
    RequestNotFound,
    StreamsError,
    Unavailable,
)
from pagestream_streams.gateway.accept import renew, renewal_s
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import chain, from_stream_fields
from pagestream_streams.scripts import POLL, REGISTER, UNREGISTER
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import ByteBudget, Periodic, Turns, raise_if_cancelled

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_REQUEST_ID_TAG = LogSlice.REQUEST_ID_FIELD_NUMBER << 3 | 2  # a field of bytes on the wire
_RETRY_PAUSE_S = 0.1
_RENEWAL_RETRY_S = 5.0
_ROUND_S = 0.004
"""Of passing on what a wake-up brings, before other tasks get their turn. A step of 256 streams takes 20 ms, and a call
that is opened needs several rounds of the event loop.
"""


class Readers:
    """Serve all open log reads of a gateway: register them, buffer wake-ups, poll the log on gaps."""

    def __init__(
        self,
        broker: Broker,
        gateway_id: str,
        *,
        serves: bool = True,
        on_end: Callable[[str, str], None] = lambda _tenant, _request_id: None,
    ) -> None:
        """Create it stopped.

        Args:
            broker: the process' connection to Redis.
            gateway_id: the gateway's name and boot nonce.
            serves: whether reads are registered, see GatewaySession.
            on_end: called with tenant and id when a read has come to the end of its log.
        """
        self._broker = broker
        self._settings = broker.settings
        self.accept_again: Callable[[RequestSpec, bool, int | None], Awaitable[object]]
        """Accepts a request that Redis has lost. Its second argument says whether queue bounds apply, its third what is
        left of the deadline in ms, where that is known."""
        self._on_end = on_end
        limit_s = 2 * self._settings.beat_limit_s  # a round must not wait for one node, or one lost connection
        self._limit_s = limit_s
        self.limits = ReadLimits(
            buffer_bytes=self._settings.buffer_bytes,
            batch_bytes=self._settings.read_bytes,
            page_entries=self._settings.read_batch,
            budget=ByteBudget(self._settings.buffers_bytes),
        )
        self.reads = OpenReads()
        self.registrations = Registrations(broker, gateway_id, self.reads, limit_s, serves=serves)
        self.poller = Poller(broker.connection, broker.settings, self.reads, limit_s)
        self.timer = Periodic("readers", self._settings.poll_ms / 4000, self.maintain)
        self._turns = Turns()
        self._closed = False
        self._renewed_at = time.monotonic()

    def start(self) -> None:
        """Poll in the background for reads that wait."""
        self.timer.start()

    async def stop(self) -> None:
        """End every read with Unavailable and take the registrations back."""
        self._closed = True
        await self.timer.stop()
        for read in self.reads:
            read.fail(Unavailable("this gateway is closing"))
        self.registrations.leave_all()
        try:
            await self.registrations.unregister()
        except Unavailable as error:
            _log.info("reads stay registered, so their grace starts when this gateway's lease ends: %s", error)

    def wake(self, message: bytes) -> Iterator[None]:
        """Pass the slices of a wake-up to their reads; yield now and then, for other tasks to get their turn."""
        until = time.perf_counter() + _ROUND_S
        awaited = self.registrations.awaited
        expected, open_reads = awaited.by_request, self.reads.by_request
        for packed in PackedWakeUp.FromString(message).slices:
            request_id = _request_id(packed)
            for read in open_reads.get(request_id, ()):
                read.offer(packed)
            if request_id in expected:
                awaited.offer(request_id, packed)
            if time.perf_counter() > until:
                yield
                until = time.perf_counter() + _ROUND_S

    def on_gap(self) -> None:
        """Poll now: wake-ups may have been lost."""
        self.registrations.awaited.note_gap()
        for read in self.reads:
            read.suspect_loss()
            if read.waiting_since is not None:
                read.waiting_since = float("-inf")
        self.timer.nudge()

    async def read(
        self,
        request_id: str,
        *,
        tenant: str,
        from_index: int = 0,
        digest: str = "",
        spec: RequestSpec | None = None,
        sink: Sink | None = None,
        on_engine: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[list[LogEntry], None]:
        """Yield batches of consecutive log entries: those that exist, then live ones, up to the end entry.

        While it runs, this gateway counts as a reader; after `aclose()` the disconnect grace starts, unless others
        read. An offset past the end of an unfinished log waits. Redis may go away and come back.

        Args:
            from_index: index of the first entry to yield.
            digest: digest of the log before `from_index`, which is then verified; "" for unknown.
            spec: the request as it was accepted. With it, a request that Redis has lost (its disk or a replica was
                behind when it died) is accepted again under its id, also in the middle of the read. Entries that were
                seen before, here or by the bringer of `digest`, are compared with those generated again, and not
                yielded twice.
            sink: takes live entries as they come, while the generator is waited for, without a switch to its task;
                entries that it has taken are not yielded. What it raises, the generator raises.
            on_engine: called with the fingerprint of the engine, before the first entries come, where their wake-up
                tells it. Entries that are read from the log don't.

        Raises:
            RequestNotFound: the tenant has no such request.
            OffsetOutOfRange: `from_index` is past the end of a finished log.
            DigestMismatch: the log differs from `digest` or from earlier entries.
            Unavailable: Redis stayed away for settings.outage_limit_s.
            QueueFull: the read begins with a lost request, and there is no room.
            ValueError: `spec` is another request's.
        """
        if spec is not None and (spec.request_id, spec.tenant) != (request_id, tenant):
            raise ValueError(f"the spec is {spec.request_id!r} of {spec.tenant!r}, not {request_id!r} of {tenant!r}")
        where = await self._with_retries(lambda: self._broker.directory.locate(request_id))
        read = LogRead(
            where,
            request_id,
            tenant=tenant,
            from_index=from_index,
            digest=digest,
            limits=self.limits,
            spec=spec,
            sink=sink,
            on_engine=on_engine,
        )
        is_registered = self.join(read)
        try:
            if not is_registered:
                await self._with_retries(lambda: self._register(read))
            while not read.ended:
                entries = await self._next(read)
                if entries:
                    if read.taken_bytes > LARGE_BYTES:
                        await self._turns.wait()
                    if fault_points.IS_ON:
                        fault_points.reach(fault_points.FaultPoint.FORWARDING)
                    yield entries
        finally:
            self._leave(read)

    def join(self, read: LogRead) -> bool:
        """Add a read; return whether it is registered, since this gateway has just accepted its request."""
        expected = self.registrations.keep(read.request_id, read.tenant)
        self.reads.add(read)
        if expected is None or expected.accepted_at is None or read.from_index:
            return False  # whoever begins within a log may be past its end, which Redis knows
        read.begin_registered(expected.slices if expected.is_whole else None)
        if read.spec is not None and read.spec.deadline_ms:
            read.deadline = expected.accepted_at + read.spec.deadline_ms / 1000
        return True

    async def maintain(self) -> None:
        """Do one round: take registrations back, poll, and renew idempotency keys. Unavailable once all is tried."""
        refused: Unavailable | None = None
        try:
            await self.registrations.unregister()
        except Unavailable as error:  # of a partition that is unreachable; reads of others wait for their logs
            refused = error
        await self.poller.poll()
        await self._renew_reservations()
        if refused is not None:
            raise refused

    def _leave(self, read: LogRead) -> None:
        read.buffer.clear()
        if read.ended:
            self._on_end(read.tenant, read.request_id)
        was_last = self.reads.remove(read)
        if read.request_id in self.registrations.awaited:
            return  # it was another tenant's: the registration is for the read that is yet to come
        if was_last and not read.ended:
            self.registrations.leave(read.where, read.request_id)
            self.timer.nudge()

    async def _next(self, read: LogRead) -> list[LogEntry]:
        while True:
            raise_if_cancelled()  # or a read whose client has gone would wait for the end of the log
            if read.failure is not None:
                raise read.failure
            if read.pop_loss():
                await self._with_retries(lambda: self._register(read))
            entries = read.pop_buffered()
            if entries or read.ended:
                return entries
            if read.pop_log_read_request():
                entries = await self._with_retries(lambda: self._from_log(read))
                read.ended = read.ended or read.exhausted
                if entries or read.ended:
                    return entries
            else:
                await read.wait(LONGEST_WAIT_S)

    async def _from_log(self, read: LogRead) -> list[LogEntry]:
        start, batch = read.log_start, read.page_entries
        log = read.where.log(read.request_id)
        rows = await self._broker.connection.read_acknowledged(
            read.where.prefix, "XRANGE", log, f"{start + 1}-0", "+", "COUNT", batch
        )
        read.note_page(len(rows), sum(len(value) for _, fields in rows for value in fields.values()))
        if len(rows) == batch:
            read.request_log_read()
        return read.verify_logged(start, [from_stream_fields(fields) for _, fields in rows])

    async def _register(self, read: LogRead) -> None:
        reply = await self.registrations.register(read)
        if reply is None and read.spec is not None:
            await self._recover(read, read.spec)
            reply = await self.registrations.register(read)
        if reply is None:
            raise RequestNotFound(read.request_id)
        read.is_registered = True
        next_index, finished, deadline_ms = reply
        if deadline_ms:
            read.deadline = time.monotonic() + deadline_ms / 1000
        if finished:
            read.end_at(next_index)

    async def _recover(self, read: LogRead, spec: RequestSpec) -> None:
        """Accept a request again that Redis has lost. What it generates is compared with what was read."""
        _log.warning("%s: Redis has lost it; it is accepted again", read.request_id)
        read.is_recovered = True
        try:
            # What was accepted once is exempt from bounds. A read that has just begun can't know that it was.
            left_ms = None
            if read.deadline is not None:
                left_ms = max(1, round((read.deadline - time.monotonic()) * 1000))
            await self.accept_again(spec, not read.is_registered, left_ms)
        except (ModelNotFound, RequestNotFound) as error:
            if not read.is_registered:
                raise
            raise Unavailable("Redis has lost the model; its engines publish it again") from error

    async def _renew_reservations(self) -> None:
        retention_s, now = self._settings.retention_s, time.monotonic()
        if now - self._renewed_at < renewal_s(retention_s):
            return
        self._renewed_at += _RENEWAL_RETRY_S  # where Redis refuses
        specs = [each.spec for each in self.reads if each.spec is not None and each.is_open]
        await renew(self._broker.connection, specs, retention_s, self._limit_s)
        self._renewed_at = now

    async def _with_retries(self, operation: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat an operation while it raises Unavailable, for at most settings.outage_limit_s."""
        limit = time.monotonic() + self._settings.outage_limit_s
        while True:
            try:
                return await operation()
            except Unavailable:
                if self._closed or time.monotonic() > limit:
                    raise
                await asyncio.sleep(_RETRY_PAUSE_S)


def _request_id(packed: bytes) -> str:
    """Return the request of a packed LogSlice: by convention its first field, and shorter than 128 bytes."""
    if len(packed) > 2 and packed[0] == _REQUEST_ID_TAG and packed[1] < 0x80:
        return packed[2 : 2 + packed[1]].decode()
    return LogSlice.FromString(packed).request_id


_EXPECTED_BYTES = 16 * 1024
"""Of the wake-ups that are kept for one expected read."""
_ALL_EXPECTED_BYTES = 8 * 1024 * 1024


class OpenReads:
    """A multimap from request ids to reads, indexed by partition: heartbeats ask for every partition.

    Several clients may read one request.
    """

    def __init__(self) -> None:
        """Create it empty."""
        self.by_request: defaultdict[str, list[LogRead]] = defaultdict(list)
        self._partitions: defaultdict[Partition, dict[LogRead, None]] = defaultdict(dict)  # in the order of `add`

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request is read."""
        return request_id in self.by_request

    def __iter__(self) -> Iterator[LogRead]:
        """Iterate over a copy of all reads."""
        return iter([read for reads in self.by_request.values() for read in reads])

    def of(self, request_id: str) -> Sequence[LogRead]:
        """Return the reads of a request; () for none."""
        return self.by_request.get(request_id, ())

    def add(self, read: LogRead) -> None:
        """Add a read."""
        self.by_request[read.request_id].append(read)
        self._partitions[read.where][read] = None

    def remove(self, read: LogRead) -> bool:
        """Remove a read; return whether it was its request's last one."""
        remaining = self.by_request[read.request_id]
        remaining.remove(read)
        del self._partitions[read.where][read]
        if not self._partitions[read.where]:
            del self._partitions[read.where]
        if remaining:
            return False
        del self.by_request[read.request_id]
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
        self.by_request: dict[str, ExpectedRead] = {}
        """By request id."""
        self.num_bytes = 0
        """Of the wake-ups that are kept for all of them."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over a copy of the ids."""
        return iter(list(self.by_request))

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request is yet to be read."""
        return request_id in self.by_request

    def slices(self, request_id: str) -> Sequence[bytes]:
        """Return the slices that are kept for a read."""
        read = self.by_request.get(request_id)
        return read.slices if read is not None else ()

    def is_whole(self, request_id: str) -> bool:
        """Return whether a read has all of its log in what is kept for it."""
        read = self.by_request.get(request_id)
        return read is not None and read.is_whole

    def expect(self, request_id: str, where: Partition, *, tenant: str, until: float) -> None:
        """Expect a read of a request that is being accepted."""
        read = self.by_request.get(request_id)
        if read is None:
            self.by_request[request_id] = ExpectedRead(where, tenant, until)
            return
        read.until = until
        self._drop(read)  # of two accepts, either may have been there before the other's wake-ups

    def note_accepted(self, request_id: str, now: float) -> None:
        """Note that an accept of a request that was not there has registered this gateway as its reader."""
        read = self.by_request.get(request_id)
        if read is not None and not read.is_doubtful:
            read.accepted_at = now

    def doubt(self, request_id: str) -> None:
        """Note that a registration of a request is being taken back: whatever an accept says, it may be gone."""
        read = self.by_request.get(request_id)
        if read is not None:
            read.is_doubtful, read.accepted_at = True, None

    def offer(self, request_id: str, packed: bytes) -> None:
        """Keep the slice of a wake-up for the read, as far as there is room."""
        read = self.by_request.get(request_id)
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
        for read in self.by_request.values():
            self._drop(read)

    def overdue(self, now: float) -> list[str]:
        """Return the requests whose reads are not expected any more at a time, as `time.monotonic()`."""
        return [request_id for request_id, read in self.by_request.items() if read.until < now]

    def pop(self, request_id: str, tenant: str | None = None) -> ExpectedRead | None:
        """Return an expected read, unless it is another tenant's, and expect it no longer."""
        read = self.by_request.get(request_id)
        if read is None or (tenant is not None and read.tenant != tenant):
            return None
        del self.by_request[request_id]
        self.num_bytes -= read.num_bytes
        return read

    def _drop(self, read: ExpectedRead) -> None:
        self.num_bytes -= read.num_bytes
        read.slices, read.num_bytes, read.is_whole = [], 0, False


LONGEST_WAIT_S = 5.0
"""Longest wait of a read for a wake-up or a poll, in case the polls have stopped."""
_READS_OF_A_ROUND = 32
"""Logs to read for wake-ups that seem to be lost. Reads of thousands would make a process that is late later still."""


class Poller:
    """Compares reads that wait with their logs, and ends reads of partitions that stay unreachable."""

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
        """Ask for the logs of the reads that have waited for settings.poll_ms."""
        limit = time.monotonic() - self._settings.poll_ms / 1000
        by_partition: defaultdict[Partition, list[LogRead]] = defaultdict(list)
        for reads in self._reads.by_request.values():
            for read in reads:
                if read.waiting_since is not None and read.waiting_since < limit:
                    by_partition[read.where].append(read)
        calls = [Call(POLL, where.prefix, [each.request_id for each in reads]) for where, reads in by_partition.items()]
        try:
            replies = await self._connection.run_each(calls, self._limit_s)
        except Unavailable as error:
            replies = [error] * len(calls)
        now, missing = time.monotonic(), list[LogRead]()
        for (where, reads), reply in zip(by_partition.items(), replies, strict=True):
            if isinstance(reply, Unavailable):
                self._note_away(where, reads, reply)
                continue
            self._away.pop(where, None)
            for read, next_index, finished in zip(reads, reply[::2], reply[1::2], strict=True):
                if read.waiting_since is not None:
                    read.waiting_since = now
                if (finished or next_index != read.next_index) and _compare(read, next_index, finished=bool(finished)):
                    missing.append(read)
        shuffle(missing)
        for read in missing[:_READS_OF_A_ROUND]:
            read.request_log_read()

    def _note_away(self, where: Partition, reads: Sequence[LogRead], error: Unavailable) -> None:
        now = time.monotonic()
        since, until = self._away.get(where, (now, now))
        if now - until > 2 * (LONGEST_WAIT_S + self._settings.command_timeout_s):
            since = now  # not polled meanwhile: no read has waited, or all were woken
        self._away[where] = since, now
        if now - since > self._settings.outage_limit_s:
            for read in reads:
                read.fail(error)


def _compare(read: LogRead, next_index: int, *, finished: bool) -> bool:
    """Act on the length of a read's log, -1 where Redis does not know the request.

    Return whether it has to be read, but need not be now.
    """
    if next_index < 0 and read.spec is not None:
        read.lose()
    elif next_index < 0:
        read.fail(RequestNotFound(read.request_id))
    elif next_index > read.next_index:
        if read.misses(next_index):
            if not read.is_after_gap:
                return True
            read.request_log_read()
    elif finished and not read.ended:
        try:
            read.end_at(next_index)
        except (OffsetOutOfRange, DigestMismatch) as error:
            read.fail(error)
    return False


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
        if request_id in self._reads.by_request or not self._serves:
            return
        self._leaving.pop(request_id, None)
        until = time.monotonic() + self._settings.accepted_unread_ms / 1000
        self.awaited.expect(request_id, where, tenant=tenant, until=until)
        if request_id in self._unregistering:
            self.awaited.doubt(request_id)

    def note_accepted(self, request_id: str) -> None:
        """Note that Redis has accepted a request that was expected."""
        self.awaited.note_accepted(request_id, time.monotonic())

    def keep(self, request_id: str, tenant: str) -> ExpectedRead | None:
        """Keep a registration: a tenant's read of the request begins. Returns what an accept has left for it."""
        self._leaving.pop(request_id, None)
        return self.awaited.pop(request_id, tenant)

    def leave(self, where: Partition, request_id: str) -> None:
        """Have a registration taken back by the next `unregister`."""
        if self._serves:
            self._leaving[request_id] = where

    def leave_all(self) -> None:
        """Have every registration taken back by the next `unregister`."""
        for read in self._reads:
            self.leave(read.where, read.request_id)
        for request_id in self.awaited:
            self._give_up(request_id)

    async def register(self, read: LogRead) -> list[int] | None:
        """Register a read. Unavailable.

        Returns:
            The log's length, 1 where it has finished, else 0, and the ms until its deadline, 0 for none; None where
            Redis knows no such request of the tenant.
        """
        [reply] = await self._register_all(read.where, [(read.request_id, read.tenant)])
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
        strays = {
            each for each in found - wanted.keys() if each not in self._reads.by_request and each not in self.awaited
        }
        for request_id in strays & self._strays[where]:
            _log.warning("%s: registered as read by this gateway, but no read is open; unregisters it", request_id)
            self._leaving[request_id] = where
        self._strays[where] = strays

    def _give_up(self, request_id: str) -> None:
        read = self.awaited.pop(request_id)
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


_ENTRY_BYTES = 64  # of an entry beside its values
_FIRST_PAGE_ENTRIES = 16  # of a log whose entries' size is not known yet
LARGE_BYTES = 2048  # of a batch, packed: it takes milliseconds to write

Sink = Callable[[Sequence[LogEntry], LogEntry | None], bool]
"""Writes entries at once and returns True, or returns False and leaves them to the read's task. It never waits.

Its second argument is the entry, where it is one token without log probabilities, as nearly always.
"""


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
            on_engine: see Readers.read.
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

    def begin_registered(self, slices: Sequence[bytes] | None) -> None:
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

    def pop_loss(self) -> bool:
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

    def pop_log_read_request(self) -> bool:
        """Return whether the log has to be read, and reset it."""
        requested, self._log_read_requested = self._log_read_requested, False
        return requested

    def pop_buffered(self) -> list[LogEntry]:
        """Return buffered entries that continue the position, of about `batch_bytes`. Others make it read the log."""
        taken: list[LogEntry] = []
        self.taken_bytes = 0
        while self.buffer and self._anchored and self.taken_bytes < self._limits.batch_bytes:
            packed = self.buffer.pop()
            self.taken_bytes += len(packed)
            if not self._verify_slice(packed, taken):
                self.request_log_read()
        return taken

    def note_page(self, num_entries: int, num_bytes: int) -> None:
        """Note the size of a page's values, so that the next one has about `batch_bytes`."""
        self.taken_bytes = num_bytes
        if num_entries:
            self._entry_bytes = num_bytes / num_entries + _ENTRY_BYTES

    def verify_logged(self, first_index: int, entries: Sequence[LogEntry]) -> list[LogEntry]:
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
        waiter, sink = self._waiter, self._sink
        if sink is None or waiter is None or waiter.done() or self.buffer.num_bytes or len(packed) > LARGE_BYTES:
            return False
        log_slice = _parsed(packed)
        if log_slice is None or not self._continues(log_slice):
            return False
        # Each use of a field makes an object or a text, so that each is used once.
        entries = log_slice.entries
        num_entries, last = len(entries), entries[-1]
        kind = last.WhichOneof("body")
        if kind == "end":
            return False
        if fault_points.IS_ON:
            fault_points.reach(fault_points.FaultPoint.FORWARDING)
        self._note_engine(log_slice)
        is_token = num_entries == 1 and kind == "token_id" and not last.HasField("logprobs")
        try:
            if not sink(entries, last if is_token else None):
                return False
        except Exception as error:  # noqa: BLE001 - it is the consumer's, whose task raises it
            waiter.set_exception(error)
            return True
        self._digest = last.digest
        self.next_index += num_entries
        self.waiting_since = time.monotonic()
        return True

    def _wake(self) -> None:
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _verify_slice(self, packed: bytes, taken: list[LogEntry]) -> bool:
        """Add a slice's entries to `taken`; return whether they continue the position."""
        log_slice = _parsed(packed)
        if log_slice is None:
            return False
        skipped = self.next_index - log_slice.first_index
        if not log_slice.entries or skipped < 0:
            return False
        if self._digest and self._continues(log_slice):
            self._advance(log_slice.entries)
            taken.extend(log_slice.entries)
        elif not self._chain(log_slice.entries[skipped:], taken):
            return False
        self._note_engine(log_slice)
        return True

    def _continues(self, log_slice: LogSlice) -> bool:
        """Return whether a slice begins at the position, after the same entries."""
        return (
            bool(self._digest)
            and log_slice.first_index == self.next_index
            and log_slice.previous_digest == self._digest
            and not self.ended
            and bool(log_slice.entries)
        )

    def _note_engine(self, log_slice: LogSlice) -> None:
        if self._on_engine is not None and (fingerprint := log_slice.fingerprint):
            self._on_engine(fingerprint)

    def _advance(self, entries: Sequence[LogEntry]) -> None:
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
        if self.num_bytes + num_bytes > self._limits.buffer_bytes or not self._limits.budget.try_acquire(num_bytes):
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
        self._limits.budget.release(num_bytes)
