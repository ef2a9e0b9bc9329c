"""A gateway's heartbeat: renew its lease in every partition, and compare registrations and queue lengths."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from pagestream_streams.connection.connection import Connection, run_on_each
from pagestream_streams.errors import Unavailable
from pagestream_streams.gateway.acceptance import Acceptor
from pagestream_streams.gateway.registrations import Registrations
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.scripts import GATEWAY_HEARTBEAT
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import Periodic, within

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
        limit_s = self._settings.beat_limit_s
        async with self._connection.dropping_idle_on_timeout():
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
