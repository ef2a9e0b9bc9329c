"""The gateway without its protocols: what all APIs call.

Accepted requests are looked up, followed and cancelled by their ids (`AcceptedRequests`); their answers end when the
process stops (`OpenStreams`). What large requests take before they are accepted is bounded (`PendingRequests`).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED, FinishReason
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_streams import Broker, GatewaySession, RequestPage, RequestView, discard_request, list_requests
from pagestream_streams.errors import DigestMismatch, OffsetOutOfRange, RequestNotFound, StreamsError, Unavailable
from pagestream_streams.gateway.readers import Sink
from pagestream_streams.tasks import ByteBudget, Turns
from pagestream_telemetry import catalog
from pagestream_telemetry.process import Telemetry

from pagestream_gateway.auth.audit import Audit
from pagestream_gateway.auth.authenticator import Authenticator, Reload
from pagestream_gateway.auth.identity import Administrator, Credentials, Identity
from pagestream_gateway.batches.uploads import Batches
from pagestream_gateway.calls import Calls, Metrics, RedisTimeout
from pagestream_gateway.errors import GatewayStopping, Overloaded, Unauthenticated, WrongCredential
from pagestream_gateway.models import Models
from pagestream_gateway.monitors import EngineMonitor, MemoryMonitor, QueueMonitor
from pagestream_gateway.settings import Settings
from pagestream_gateway.submission import Submission
from pagestream_gateway.text.encoder import TokenizePool

logger = logging.getLogger(__name__)


_PLACE_LIMIT_S = 0.25  # an answer does not wait for longer to say where its request stands


class QueuePlace(NamedTuple):
    """Where a request stands that no engine has claimed yet."""

    position: int
    """Requests of its model that go before it."""
    expected_wait_ms: int | None
    """Until an engine claims it, by the measured rate; None for unknown."""


@dataclass(frozen=True)
class AcceptedRequests:
    """Requests by their ids. The id of another tenant's request raises RequestNotFound, as an unknown one does."""

    broker: Broker
    session: GatewaySession
    metrics: Metrics
    limit: RedisTimeout

    def follow(
        self,
        spec: RequestSpec,
        *,
        from_index: int = 0,
        digest: str = "",
        sink: Sink | None = None,
        on_engine: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[list[LogEntry], None]:
        """Yield batches of log entries from `from_index` to the end of the log.

        Close the generator (`aclosing`): that removes the reader from the request. A request that Redis loses
        meanwhile is accepted again and goes on under the same id. `sink` takes live entries, and `on_engine` gets the
        fingerprint of their engine: see GatewaySession.read.
        """
        return self.session.read(
            spec.request_id,
            tenant=spec.tenant,
            from_index=from_index,
            digest=digest,
            spec=spec,
            sink=sink,
            on_engine=on_engine,
        )

    async def resume(self, request_id: str, tenant: str, *, from_index: int, digest: str) -> tuple[RequestView, bool]:
        """Look up a request that a reader wants to read on from `from_index`.

        Returns the request, and whether its log has ended there. Raises RequestNotFound, also for one that was deleted,
        OffsetOutOfRange, DigestMismatch, Unavailable. The digest of a place that the log has not reached yet is checked
        by `follow`.
        """
        view = _kept(await self.limit.wait(self.broker.view(request_id, tenant, with_position=False)))
        if from_index > view.next_index and view.state == REQUEST_STATE_FINISHED:
            raise OffsetOutOfRange(request_id, from_index, view.next_index)
        if from_index == view.next_index and digest and digest != view.digest:
            raise DigestMismatch(request_id, from_index)
        if 0 < from_index < view.next_index and digest:
            await self._check_digest(view.spec, from_index, digest)
        return view, from_index == view.next_index and view.state == REQUEST_STATE_FINISHED

    async def view(self, request_id: str, tenant: str) -> RequestView:
        """Return a request's state. Raises RequestNotFound, also for one that was deleted; Unavailable."""
        return _kept(await self.limit.wait(self.broker.view(request_id, tenant)))

    async def place(self, spec: RequestSpec) -> QueuePlace | None:
        """Return where a queued request stands; None where an engine has it, or Redis does not tell at once."""
        try:
            async with asyncio.timeout(_PLACE_LIMIT_S):
                found = await self.broker.place(spec.request_id, spec.tenant)
        except (TimeoutError, StreamsError):
            return None  # an answer is worth more than its place
        return None if found is None else QueuePlace(found.requests, found.wait_ms)

    async def fingerprint(self, spec: RequestSpec) -> str:
        """Return the fingerprint of the engine that runs or ran a request; "" where Redis does not tell it now."""
        try:
            return await self.limit.wait(self.broker.fingerprint(spec.request_id, spec.tenant))
        except StreamsError:
            return ""  # an answer is worth more than this field

    async def list(self, tenant: str, *, limit: int, after: str) -> RequestPage:
        """Return a tenant's requests, newest first. Raises RequestNotFound for an `after` that is not listed."""
        return await self.limit.wait(list_requests(self.broker, tenant, limit=limit, after=after))

    async def cancel(self, request_id: str, tenant: str) -> FinishReason:
        """End a request in whatever state it is; return how it ended. Raises RequestNotFound, Unavailable."""
        reason = await self.limit.wait(self.broker.cancel(request_id, tenant))
        self.metrics.cancelled((await self.broker.directory.locate(request_id)).model)
        logger.info("cancelled", extra={"request_id": request_id, "tenant": tenant})
        return reason

    async def discard(self, request_id: str, tenant: str) -> None:
        """End a request, and let its record and log expire within a minute. Raises RequestNotFound, Unavailable."""
        await self.limit.wait(discard_request(self.broker, request_id, tenant))
        logger.info("discarded", extra={"request_id": request_id, "tenant": tenant})

    async def _check_digest(self, spec: RequestSpec, from_index: int, digest: str) -> None:
        async with aclosing(self.follow(spec, from_index=from_index, digest=digest)) as batches:
            await self.limit.wait(anext(batches))


def _kept(view: RequestView) -> RequestView:
    """Return a view. Raises RequestNotFound for a request that was deleted, whose record expires within a minute."""
    if view.is_discarded:
        raise RequestNotFound(view.request_id)
    return view


class OpenStreams:
    """The tasks that write answers.

    `drain` cancels those that don't end in time; `entered` turns that cancellation, and no other, into
    GatewayStopping, which each API reports to its client.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: set[asyncio.Task[object]] = set()
        self._ended: set[asyncio.Task[object]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_stopping = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Register the running task while it writes an answer.

        Raises GatewayStopping where the process is stopping already, and when `drain` ends the answer.
        """
        task = asyncio.current_task()
        if task is None or self.is_stopping:
            raise GatewayStopping
        self._tasks.add(task)
        self._empty.clear()
        self._metrics.stream_opened()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise GatewayStopping from None
        finally:
            self._tasks.discard(task)
            self._ended.discard(task)
            self._metrics.stream_closed()
            if not self._tasks:
                self._empty.set()

    async def drain(self, limit_s: float) -> None:
        """Refuse new answers, wait `limit_s` seconds for the open ones, then end these."""
        self.is_stopping = True
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            for task in tuple(self._tasks):
                self._ended.add(task)
                task.cancel()


SMALL_BYTES = 64 * 1024
"""Bytes of a request that is parsed in less time than a thread takes to answer."""


PATIENCE_S = 2.0
"""Seconds in which a body is received whole, unless its sender or the network is slow."""


TICKS = 20
"""Parts that a patience is measured in. A process that is late reads late, so each counts once however long it took."""


class PatientClock:
    """Seconds in which this process has had time to read: it stands while nothing waits, and slows while it is late."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def tick(self, period_s: float) -> None:
        """Wait for the period, and count it once."""
        await asyncio.sleep(period_s)
        self.now_s += period_s


class PendingRequest:
    """One request's place among the pending ones."""

    def __init__(self, patience_s: float, clock: PatientClock) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._scope: asyncio.Timeout | None = None
        self._began_at = 0.0

    @contextlib.asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Receive the body inside the block. Raises Overloaded where it takes long and others wait for its room."""
        self._began_at = self._clock.now_s
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError as error:
            raise Overloaded("the body arrives slowly, and other large requests wait for its room", 5.0) from error
        finally:
            self._scope = None

    def give_way(self) -> bool:
        """End the receiving where others have waited for it for long; return whether they have."""
        # Half a tick less: the clock's sums are rounded.
        least_s = self._patience_s * (1 - 0.5 / TICKS)
        if self._scope is None or self._clock.now_s - self._began_at < least_s:
            return False
        self._scope.reschedule(0.0)
        self._scope = None
        return True


class PendingRequests:
    """Bounds the bytes of large requests that are read, parsed and tokenized at once; further ones wait in order.

    Where one has waited for the patience, the request whose body has been arriving for longest gives way.
    """

    def __init__(self, max_bytes: int, *, limit_s: float, patience_s: float | None = None) -> None:
        """`limit_s`: seconds that a request may wait; `patience_s`: PATIENCE_S where it is None."""
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self.parsing = asyncio.Lock()
        """Held while a large body is parsed. A parser holds Python's lock for tens of milliseconds at a time, and two
        would keep the event loop waiting twice as long.
        """
        self._budget = ByteBudget(max_bytes)
        self._limit_s = limit_s
        self._admitted: dict[PendingRequest, None] = {}  # in order
        self._clock = PatientClock()
        self._due_at: dict[object, float] = {}  # of those that wait, on the clock, in order
        self._impatience: asyncio.Task[None] | None = None  # while one waits

    @contextlib.asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[PendingRequest]:
        """Count a request of so many bytes as pending inside the block; small ones do not count. Raises Overloaded."""
        num_bytes = 0 if num_bytes <= SMALL_BYTES else min(num_bytes, self._budget.limit_bytes)
        if num_bytes and not self._budget.try_take(num_bytes):
            await self._wait(num_bytes)
        request = PendingRequest(self._patience_s, self._clock)
        if num_bytes:
            self._admitted[request] = None
        try:
            yield request
        finally:
            self._admitted.pop(request, None)
            self._budget.give(num_bytes)

    async def _wait(self, num_bytes: int) -> None:
        waiter = object()
        self._due_at[waiter] = self._clock.now_s + self._patience_s
        if self._impatience is None:
            self._impatience = asyncio.create_task(self._make_room(), name="impatience")
        try:
            async with asyncio.timeout(self._limit_s):
                await self._budget.take(num_bytes)
        except TimeoutError as error:
            raise Overloaded(
                f"large requests of {self._budget.limit_bytes} bytes together are being read", retry_after_s=5.0
            ) from error
        finally:
            del self._due_at[waiter]
            if not self._due_at:
                self._impatience.cancel()
                self._impatience = None

    async def _make_room(self) -> None:
        while True:
            await self._clock.tick(self._patience_s / TICKS)
            for waiter, due_at in list(self._due_at.items()):
                if due_at > self._clock.now_s:
                    break
                del self._due_at[waiter]
                self._due_at[waiter] = self._clock.now_s + self._patience_s
                any(request.give_way() for request in list(self._admitted))  # the first that can


_PUBLIC_METRICS = frozenset({catalog.STREAMS_OPEN})


@dataclass(frozen=True)
class Gateway:
    """One process' parts. Nothing that a stream needs is held here: all of it is in Redis."""

    settings: Settings
    broker: Broker
    limit: RedisTimeout
    authenticator: Authenticator
    models: Models
    submission: Submission
    requests: AcceptedRequests
    pool: TokenizePool
    pending: PendingRequests
    streams: OpenStreams
    calls: Calls
    queue: QueueMonitor
    memory: MemoryMonitor
    engines: EngineMonitor
    telemetry: Telemetry
    answer_budget: ByteBudget
    """Bytes of answers that are not streamed."""
    batches: Batches
    audit: Audit
    reloads: Sequence[Reload]
    """What is read again when an administrator asks for it."""
    turns: Turns
    """Of requests that are read and checked: a burst of them must not hold up the streams."""

    async def identify(self, credentials: Credentials) -> Identity:
        """Return who makes a call with these credentials.

        Raises GatewayStopping, Unauthenticated, WrongCredential, CredentialsUnavailable.
        """
        with self._checking(credentials):
            return replace(await self.authenticator.identify(credentials), peer=credentials.peer)

    async def identify_administrator(self, credentials: Credentials) -> Administrator:
        """Return which administrator makes a call. Raises as `identify`."""
        with self._checking(credentials):
            return await self.authenticator.administrator(credentials)

    async def cancel(self, request_id: str, identity: Identity) -> FinishReason:
        """End a caller's request in whatever state it is; return how it ended. Raises RequestNotFound, Unavailable."""
        reason = await self.requests.cancel(request_id, identity.tenant)
        self.audit.cancelled(identity, request_id)
        return reason

    async def discard(self, request_id: str, identity: Identity) -> None:
        """End a caller's request, and let it expire within a minute. Raises RequestNotFound, Unavailable."""
        await self.requests.discard(request_id, identity.tenant)
        self.audit.cancelled(identity, request_id)

    @contextmanager
    def _checking(self, credentials: Credentials) -> Iterator[None]:
        if self.streams.is_stopping:
            raise GatewayStopping
        try:
            yield
        except (Unauthenticated, WrongCredential) as error:
            self.audit.failed(credentials.peer, str(error))
            raise

    async def is_ready(self) -> bool:
        """Return whether Redis answers, a model is known, and the process is not stopping."""
        try:
            await self.limit.wait(self.broker.ping())
            return await self.models.is_any_known() and not self.streams.is_stopping
        except Unavailable:
            return False

    async def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text form; those of the queue are absent where Redis does not answer."""
        await asyncio.gather(self.queue.refresh(), self.memory.refresh())
        return self.telemetry.render()

    def public_exposition(self) -> bytes:
        """Return what anyone may read, in the same form: what tells nothing of tenants, models and machines."""
        return self.telemetry.render_some(_PUBLIC_METRICS)
