"""A gateway's registration, the public face of this folder, and its heartbeat.

A beat renews the lease in every partition, and compares registrations and queue lengths.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from pagestream_streams.admin.broker import Broker
from pagestream_streams.admin.sweeper import Sweeper
from pagestream_streams.connection.connection import Connection, Subscription, run_on_each
from pagestream_streams.errors import Unavailable
from pagestream_streams.gateway.accept import Acceptor, LogQuota
from pagestream_streams.gateway.readers import Readers, Registrations
from pagestream_streams.limits import EndCounter, RateLimiter
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.rates import LimitSource
from pagestream_streams.scripts import GATEWAY_HEARTBEAT
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import Periodic, within


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
        self.quota = LogQuota(broker)
        self.rate_limiter = RateLimiter(broker, limits)
        self.ends = EndCounter(broker)
        self.sweeper = Sweeper(broker, self._partitions, on_ends=self.ends.note_partition)
        self.readers = Readers(broker, self._id, serves=serves, on_end=self.quota.note_ended)
        self.acceptor = Acceptor(
            broker,
            self._id if serves else "",
            reads=self.readers.registrations,
            quota=self.quota,
            rate_limiter=self.rate_limiter,
            woken=self.sweeper.woken,
            has_limits=limits is not None,
        )
        self.readers.accept_again = self.acceptor.accept_again
        # What a request needs, by the parts that do it: a call enters nothing here.
        self.place, self.accept, self.accept_once = self.acceptor.place, self.acceptor.accept, self.acceptor.accept_once
        self.read = self.readers.read
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

    async def _awake_partitions(self) -> list[Partition]:
        partitions, read = await self._partitions(), {read.where.model for read in self.readers.reads}
        awake = {where.model for where in self.sweeper.awake(partitions)}
        return [where for where in partitions if where.model in awake or where.model in read]

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
