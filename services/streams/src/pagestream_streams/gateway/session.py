"""A gateway's registration, the public face of this folder, and its heartbeat.

A beat renews the lease in every partition, and compares registrations and queue lengths.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED
from pagestream.v1.records_pb2 import LogEntry, RequestSpec

from pagestream_streams.admin.broker import Broker, enlist, free_key
from pagestream_streams.admin.sweeper import Sweeper
from pagestream_streams.connection.connection import Connection, Subscription, run_on_each
from pagestream_streams.errors import (
    LogsFull,
    ModelNotFound,
    QueueFull,
    RateLimited,
    RequestNotFound,
    StorageFull,
    Unavailable,
)
from pagestream_streams.gateway.accept import Acceptor, LogQuota, release, shorten
from pagestream_streams.gateway.readers import Readers, Registrations, Sink
from pagestream_streams.limits import EndCounter, RateLimiter, RateReservation
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.rates import LimitSource, Rate
from pagestream_streams.scripts import GATEWAY_HEARTBEAT
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import Periodic, within

_MOST_DISCARDED = 2  # requests of one idempotency key that are found discarded while it is asked for


class _Running(NamedTuple):
    """What an idempotency key stands for."""

    spec: RequestSpec
    is_discarded: bool = False


class GatewaySession:
    """Used as `async with GatewaySession(broker) as gateway`. All that it holds can be rebuilt from Redis.

    The attributes are its collaborators: each does one thing and is tested by its own public methods.
    """

    def __init__(
        self,
        broker: Broker,
        gateway_id: str | None = None,
        *,
        serves: bool = True,
        limits: LimitSource | None = None,
    ) -> None:
        """Create a session; nothing is sent before `async with`. ValueError for an id with white space.

        Args:
            broker: the process' connection to Redis; closed after the session.
            gateway_id: a readable name, to which a boot nonce is added.
            serves: False for a tool that only reads: it has no lease, so that the graces of clients whose gateways are
                all dead don't start, it sweeps nothing, and it does not count as a reader.
            limits: what tenants may use; None for no limits.
        """
        name = gateway_id or "gateway"
        if any(character.isspace() for character in name):
            raise ValueError(f"expected a gateway id without spaces, got {gateway_id!r}")
        self._id = f"{name}:{secrets.token_hex(8)}"
        self._broker = broker
        self._settings = broker.settings
        self._serves = serves
        self.acceptor = Acceptor(broker, self._id if serves else "")
        self.acceptor.has_limits = limits is not None
        self.quota = LogQuota(broker)
        self.rate_limiter = RateLimiter(broker, limits)
        self.ends = EndCounter(broker)
        self.readers = Readers(broker, self._id, self._accept_again, serves=serves, on_end=self.quota.note_ended)
        self.subscription = Subscription(
            broker.connection, [broker.connection.keyspace.wake_ups(self._id)], self.readers.wake, self.readers.on_gap
        )
        self.heartbeat = GatewayHeartbeat(
            broker.connection,
            broker.settings,
            self._id,
            partitions=self._awake_partitions,
            registrations=self.readers.registrations,
            acceptor=self.acceptor,
        )
        self.sweeper = Sweeper(broker, self._partitions, on_ends=self.ends.note_partition)

    @property
    def gateway_id(self) -> str:
        """The name and the boot nonce."""
        return self._id

    @property
    def num_reclaimed(self) -> int:
        """Requests of dead engines that this process has returned to their queues."""
        return self.sweeper.num_reclaimed

    async def __aenter__(self) -> Self:
        """Start the subscription, the heartbeat, the polls and the sweeps, also while Redis is unreachable."""
        self._broker.end_listeners.append(self.quota.note_ended)
        self.subscription.start()
        if self._serves:
            self.heartbeat.start()
            self.sweeper.start()
        self.readers.start()
        self.quota.timer.start()
        self.rate_limiter.timer.start()
        self.ends.timer.start()
        await self.subscription.subscribed(self._settings.command_timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop them all, and take the registrations of reads back: their grace starts."""
        self._broker.end_listeners.remove(self.quota.note_ended)
        await self.sweeper.stop()
        await self.heartbeat.stop()
        await self.subscription.stop()
        await self.readers.stop()
        await self.quota.timer.stop()
        await self.rate_limiter.stop()
        await self.ends.timer.stop()

    async def place(self, model: str, prompt_token_ids: Sequence[int], tenant: str, *, cache_salt: bytes = b"") -> str:
        """Create a request id of the tenant on the partition of the prompt's first tokens and its cache salt.

        Where that partition is overloaded, the id is on a second one that the tokens also determine.

        Raises:
            ModelNotFound: no engine has ever published the model.
            Unavailable: Redis can't serve now.
        """
        return await self.acceptor.place(model, prompt_token_ids, tenant, cache_salt)

    async def accept(
        self,
        spec: RequestSpec,
        *,
        is_length_given: bool = True,
        on_rates: Callable[[Sequence[Rate]], None] = lambda _rates: None,
    ) -> bool:
        """Accept a request durably, and register this gateway as its reader. Accepting an id again changes nothing.

        Args:
            is_length_given: whether its caller has named max_tokens, see Acceptor.demand.
            on_rates: called with how far the limits are used that the caller has, once it is admitted.

        Returns:
            Whether this call accepted it. Else it had been accepted before, by a lost try of this one or by another
            caller, perhaps with another seed: `broker.spec` returns what runs.

        Raises:
            QueueFull: the queue's bound, or the tenant's share of it, is reached.
            ClassRefused: a QueueFull; all engines are short of memory and take no more of this class.
            RateLimited: a limit of the tenant or its credential has no room for it.
            LogsFull: the tenant's logs take what they may.
            RequestNotFound: the id is of an unknown model or another tenant.
            ModelNotFound: the model was removed.
            Unavailable: the request may have been accepted all the same; a retry is harmless.
        """
        admission = None
        if self.rate_limiter.is_on:
            demand = self.acceptor.demand(spec, is_length_given=is_length_given)
            admission = await self.rate_limiter.admit(spec, demand)
        if admission is not None:
            on_rates(admission.rates)
        return await self._accept_admitted(spec, admission, bounded=True)

    async def accept_once(
        self,
        spec: RequestSpec,
        *,
        body_digest: str,
        is_length_given: bool = True,
        on_rates: Callable[[Sequence[Rate]], None] = lambda _rates: None,
    ) -> RequestSpec:
        """Accept a request once for its tenant and idempotency key. A retry completes an accept that was interrupted.

        A retry after the request's end renews its log, so that the key never outlives it. A refusal frees the key, and
        so does a request that its tenant has discarded: the try is then a new request.

        Args:
            body_digest: digest of the client's body; tries with the same key must have the same.
            is_length_given, on_rates: as `accept`. A try that joins an earlier one is not counted again.

        Returns:
            What runs: the spec, or that of an earlier try.

        Raises:
            IdempotencyConflict: the key was used with another body.
            QueueFull, RateLimited, LogsFull, ModelNotFound, RequestNotFound, Unavailable: as `accept`.
        """
        for _ in range(_MOST_DISCARDED + 1):
            running = await self._accepted_once(spec, body_digest, is_length_given, on_rates)
            if not running.is_discarded:
                return running.spec
            await free_key(self._broker, running.spec)
        raise Unavailable("the request was discarded while it was accepted; try again with another id")

    async def _accepted_once(
        self, spec: RequestSpec, body_digest: str, is_length_given: bool, on_rates: Callable[[Sequence[Rate]], None]
    ) -> _Running:
        connection = self._broker.connection
        reservation, same = await self.acceptor.reserved(spec, body_digest)
        try:
            if await self._is_known(same, spec):
                is_new = await self._accept(same, True)
            else:
                is_new = await self.accept(same, is_length_given=is_length_given, on_rates=on_rates)
            if is_new:
                return _Running(same)
        except (QueueFull, RateLimited, LogsFull, ModelNotFound, RequestNotFound, StorageFull):
            await release(connection, reservation)
            raise
        view = await self._broker.view(same.request_id, spec.tenant, with_position=False)
        if view.state == REQUEST_STATE_FINISHED:
            await shorten(connection, reservation, self._settings.retention_s)
        return _Running(view.spec, view.is_discarded)

    def read(
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
        return self.readers.read(
            request_id,
            tenant=tenant,
            from_index=from_index,
            digest=digest,
            spec=spec,
            sink=sink,
            on_engine=on_engine,
        )

    async def _accept(self, spec: RequestSpec, bounded: bool, deadline_ms: int | None = None) -> bool:
        self.sweeper.woken.add(spec.model)
        registrations = self.readers.registrations

        def expect(where: Partition, request_id: str) -> None:
            registrations.expect(where, request_id, spec.tenant)

        is_new = await self.acceptor.accept(spec, bounded=bounded, expect=expect, deadline_ms=deadline_ms)
        if is_new and not spec.ends_when_accepted:  # a log with its end has no readers
            registrations.awaited.note_accepted(spec.request_id, time.monotonic())
        if not is_new and spec.idempotency_key:
            self.quota.note_ended(spec.tenant, spec.request_id)  # where it has, its log is now kept for longer
        return is_new

    async def _accept_admitted(
        self,
        spec: RequestSpec,
        admission: RateReservation | None,
        *,
        bounded: bool,
        deadline_ms: int | None = None,
        is_logged: bool = True,
    ) -> bool:
        """Accept a request, or give back what was reserved for it. `is_logged`: whether the log's quota applies."""
        tries = 0
        try:
            tries = await self.quota.reserve(spec, bounded=is_logged)
            is_new = await self._accept(spec, bounded, deadline_ms)
        except (QueueFull, LogsFull, ModelNotFound, RequestNotFound, StorageFull):
            await self.quota.release(spec, tries)
            await self.rate_limiter.release(spec, admission)
            raise
        if not is_new:
            await self.rate_limiter.release(spec, admission)
        return is_new

    async def _accept_again(self, spec: RequestSpec, bounded: bool, deadline_ms: int | None) -> None:
        """Accept a request that Redis has lost, and what stands beside its record."""
        demand = self.acceptor.demand(spec, is_length_given=False)
        admission = await self.rate_limiter.admit(spec, demand, bounded=False)
        await self._accept_admitted(spec, admission, bounded=bounded, deadline_ms=deadline_ms, is_logged=False)
        await enlist(self._broker, spec.request_id, spec.tenant)

    async def _awake_partitions(self) -> list[Partition]:
        partitions, read = await self._partitions(), {read.where.model for read in self.readers.reads}
        awake = {where.model for where in self.sweeper.awake(partitions)}
        return [where for where in partitions if where.model in awake or where.model in read]

    async def _is_known(self, same: RequestSpec, spec: RequestSpec) -> bool:
        """Return whether an earlier try's request is in Redis: what bounds new requests doesn't concern it then."""
        if same is spec:
            return False
        try:
            await self._broker.view(same.request_id, same.tenant, with_position=False)
        except RequestNotFound:
            return False
        return True

    async def _partitions(self) -> list[Partition]:
        directory = self._broker.directory
        return [where for name in await directory.names() for where in await directory.all_partitions(name)]


_log = logging.getLogger(__name__)


class GatewayHeartbeat:
    """Beats every settings.heartbeat_ms."""

    def __init__(
        self,
        connection: Connection,
        settings: StreamsSettings,
        gateway_id: str,
        *,
        partitions: Callable[[], Awaitable[Sequence[Partition]]],
        registrations: Registrations,
        acceptor: Acceptor,
    ) -> None:
        """Create it stopped. `partitions` returns all partitions of all models."""
        self._connection = connection
        self._settings = settings
        self._gateway_id = gateway_id
        self._partitions = partitions
        self._registrations = registrations
        self._acceptor = acceptor
        self._known: Sequence[Partition] = ()
        self._timer = Periodic("gateway heartbeat", settings.heartbeat_ms / 1000, self.beat)

    def start(self) -> None:
        """Beat at once, then periodically in the background."""
        self._timer.start()

    async def stop(self) -> None:
        """Cancel the beat in flight, and beat no more."""
        await self._timer.stop()

    async def beat(self) -> None:
        """Renew the lease, with a limit on the replies so that another beat comes within the lease. Unavailable."""
        try:
            await self._beat(self._settings.beat_limit_s)
        except Unavailable as error:
            await self._connection.drop_idle_after(error)
            raise

    async def _beat(self, limit_s: float) -> None:
        partitions = await self._read_partitions(limit_s / 2)
        arguments = self._gateway_id, self._settings.lease_ms
        replies = await run_on_each(self._connection, GATEWAY_HEARTBEAT, partitions, arguments, limit_s)
        for where, reply in zip(partitions, replies, strict=True):
            if isinstance(reply, Unavailable):
                continue
            registered, queued = reply
            self._acceptor.placer.note_queued(where, queued)
            async with within(limit_s / 2, f"the registrations in {where.prefix}"):
                await self._registrations.compare(where, registered)
        models = {where.model for where in partitions}
        if self._acceptor.engines.read_at.keys() - models:
            self._acceptor.engines.keep_only(models)
        await self._acceptor.engines.read(models, limit_s / 2)
        if replies and all(isinstance(reply, Unavailable) for reply in replies):
            raise replies[0]

    async def _read_partitions(self, limit_s: float) -> Sequence[Partition]:
        try:
            async with within(limit_s, "a read of the partitions"):
                self._known = await self._partitions()
        except Unavailable as error:
            if not self._known:
                raise
            _log.info("%s: uses the known partitions: %s", self._gateway_id, error)
        return self._known
