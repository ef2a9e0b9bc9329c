"""All reads of one gateway: entries from wake-ups, and from the log where wake-ups fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import TypeVar

from pagestream.v1.records_pb2 import LogEntry, LogSlice, PackedWakeUp, RequestSpec

from pagestream_streams.admin.broker import Broker
from pagestream_streams.errors import ModelNotFound, RequestNotFound, Unavailable
from pagestream_streams.fault_points import FaultPoint, reach
from pagestream_streams.gateway.follower import LARGE_BYTES, Follower, Sink
from pagestream_streams.gateway.open_reads import OpenReads
from pagestream_streams.gateway.polling import LONGEST_WAIT_S, Poller
from pagestream_streams.gateway.registrations import Registrations
from pagestream_streams.gateway.reservations import renew, renewal_s
from pagestream_streams.gateway.slice_buffer import ReadLimits
from pagestream_streams.protocol.records import from_stream_fields
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
        accept_again: Callable[[RequestSpec, bool, int | None], Awaitable[object]],
        *,
        serves: bool = True,
        on_end: Callable[[str, str], None] = lambda _tenant, _request_id: None,
    ) -> None:
        """Create it stopped.

        Args:
            broker: the process' connection to Redis.
            gateway_id: the gateway's name and boot nonce.
            accept_again: accepts a request that Redis has lost. Its second argument says whether queue bounds apply,
                its third what is left of the deadline in ms, where that is known.
            serves: whether reads are registered, see GatewaySession.
            on_end: called with tenant and id when a read has come to the end of its log.
        """
        self._broker = broker
        self._settings = broker.settings
        self._accept_again = accept_again
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
        for follower in self.reads:
            follower.fail(Unavailable("this gateway is closing"))
        self.registrations.leave_all()
        try:
            await self.registrations.unregister()
        except Unavailable as error:
            _log.info("reads stay registered, so their grace starts when this gateway's lease ends: %s", error)

    def wake(self, message: bytes) -> Iterator[None]:
        """Pass the slices of a wake-up to their reads; yield now and then, for other tasks to get their turn."""
        until = time.perf_counter() + _ROUND_S
        for packed in PackedWakeUp.FromString(message).slices:
            request_id = _request_id(packed)
            for follower in self.reads.of(request_id):
                follower.offer(packed)
            self.registrations.awaited.offer(request_id, packed)
            if time.perf_counter() > until:
                yield
                until = time.perf_counter() + _ROUND_S

    def on_gap(self) -> None:
        """Poll now: wake-ups may have been lost."""
        self.registrations.awaited.note_gap()
        for follower in self.reads:
            follower.suspect_loss()
            if follower.waiting_since is not None:
                follower.waiting_since = float("-inf")
        self.timer.nudge()

    async def read(
        self,
        request_id: str,
        *,
        tenant: str,
        from_index: int,
        digest: str,
        spec: RequestSpec | None,
        sink: Sink | None = None,
        on_engine: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[list[LogEntry], None]:
        """Yield batches of a log's entries; see GatewaySession.read."""
        where = await self._with_retries(lambda: self._broker.directory.locate(request_id))
        follower = Follower(
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
        is_registered = self.join(follower)
        try:
            if not is_registered:
                await self._with_retries(lambda: self._register(follower))
            while not follower.ended:
                entries = await self._next(follower)
                if entries:
                    if follower.taken_bytes > LARGE_BYTES:
                        await self._turns.take()
                    reach(FaultPoint.FORWARDING)
                    yield entries
        finally:
            self._leave(follower)

    def join(self, follower: Follower) -> bool:
        """Add a read; return whether it is registered, since this gateway has just accepted its request."""
        expected = self.registrations.keep(follower.request_id, follower.tenant)
        self.reads.add(follower)
        if expected is None or expected.accepted_at is None or follower.from_index:
            return False  # whoever begins within a log may be past its end, which Redis knows
        follower.begin(expected.slices if expected.is_whole else None)
        if follower.spec is not None and follower.spec.deadline_ms:
            follower.deadline = expected.accepted_at + follower.spec.deadline_ms / 1000
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

    def _leave(self, follower: Follower) -> None:
        follower.buffer.clear()
        if follower.ended:
            self._on_end(follower.tenant, follower.request_id)
        was_last = self.reads.remove(follower)
        if follower.request_id in self.registrations.awaited:
            return  # it was another tenant's: the registration is for the read that is yet to come
        if was_last and not follower.ended:
            self.registrations.leave(follower.where, follower.request_id)
            self.timer.nudge()

    async def _next(self, follower: Follower) -> list[LogEntry]:
        while True:
            raise_if_cancelled()  # or a read whose client has gone would wait for the end of the log
            if follower.failure is not None:
                raise follower.failure
            if follower.take_loss():
                await self._with_retries(lambda: self._register(follower))
            entries = follower.take_buffered()
            if entries or follower.ended:
                return entries
            if follower.take_log_read_request():
                entries = await self._with_retries(lambda: self._from_log(follower))
                follower.ended = follower.ended or follower.exhausted
                if entries or follower.ended:
                    return entries
            else:
                await follower.wait(LONGEST_WAIT_S)

    async def _from_log(self, follower: Follower) -> list[LogEntry]:
        start, batch = follower.log_start, follower.page_entries
        log = follower.where.log(follower.request_id)
        rows = await self._broker.connection.read_acknowledged(
            follower.where.prefix, "XRANGE", log, f"{start + 1}-0", "+", "COUNT", batch
        )
        follower.note_page(len(rows), sum(len(value) for _, fields in rows for value in fields.values()))
        if len(rows) == batch:
            follower.request_log_read()
        return follower.take_logged(start, [from_stream_fields(fields) for _, fields in rows])

    async def _register(self, follower: Follower) -> None:
        reply = await self.registrations.register(follower)
        if reply is None and follower.spec is not None:
            await self._recover(follower, follower.spec)
            reply = await self.registrations.register(follower)
        if reply is None:
            raise RequestNotFound(follower.request_id)
        follower.is_registered = True
        next_index, finished, deadline_ms = reply
        if deadline_ms:
            follower.deadline = time.monotonic() + deadline_ms / 1000
        if finished:
            follower.end_at(next_index)

    async def _recover(self, follower: Follower, spec: RequestSpec) -> None:
        """Accept a request again that Redis has lost. What it generates is compared with what was read."""
        _log.warning("%s: Redis has lost it; it is accepted again", follower.request_id)
        follower.is_recovered = True
        try:
            # What was accepted once is exempt from bounds. A read that has just begun can't know that it was.
            left_ms = None
            if follower.deadline is not None:
                left_ms = max(1, round((follower.deadline - time.monotonic()) * 1000))
            await self._accept_again(spec, not follower.is_registered, left_ms)
        except (ModelNotFound, RequestNotFound) as error:
            if not follower.is_registered:
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
