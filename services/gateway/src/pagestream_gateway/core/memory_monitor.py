"""How full Redis is: metrics that warn before it refuses requests, and a sentence for /readyz when it does."""

import asyncio
import logging
import time
from itertools import islice

from pagestream_streams import Broker, GatewaySession
from pagestream_streams.admin.observation import MemoryUse, entry_size, memory_use
from pagestream_streams.errors import StreamsError
from pagestream_streams.tasks import Periodic
from pagestream_telemetry import catalog
from pagestream_telemetry.instruments import Registry

logger = logging.getLogger(__name__)

_MEMORY_FRESH_S = 1.0  # what was read this soon before is used again
_LIMIT_S = 2.0  # after which the values count as unknown
_LEAST_ENTRIES = 64  # of a log that is measured: shorter ones are mostly overhead
_MOST_LOGS = 8  # measured at once


class MemoryMonitor:
    """Reads Redis' memory and sets the gauges. Unknown values are not exported: old ones would look current."""

    def __init__(self, broker: Broker, session: GatewaySession, registry: Registry) -> None:
        self._broker = broker
        self._session = session
        self._used = registry.number(catalog.REDIS_MEMORY_USED)
        self._limit = registry.number(catalog.REDIS_MEMORY_LIMIT)
        self._entry_size = registry.number(catalog.REDIS_LOG_ENTRY_SIZE)
        self._read_at = float("-inf")
        self._use: MemoryUse | None = None

    async def is_full(self) -> bool:
        """Return whether Redis is at its memory limit; False where it does not answer."""
        await self.refresh()
        return self._use is not None and self._use.is_full

    async def refresh(self, fresh_s: float = _MEMORY_FRESH_S) -> None:
        """Read Redis' memory, unless it was read in the last `fresh_s` seconds."""
        if time.monotonic() - self._read_at < fresh_s:
            return
        use, size = None, None
        try:
            async with asyncio.timeout(_LIMIT_S):
                use = await memory_use(self._broker.connection)
                size = await entry_size(self._broker.connection, self._logs())
        except (TimeoutError, StreamsError) as error:
            logger.debug("cannot read Redis' memory: %s", error)
        self._read_at, self._use = time.monotonic(), use
        self._set(use, size)

    def watch(self, period_s: float) -> Periodic:
        """Return a task that reads Redis' memory every `period_s` seconds, once it is started."""
        return Periodic("memory metrics", period_s, lambda: self.refresh(period_s / 2))

    def _logs(self) -> list[str]:
        long = (each for each in self._session.readers.reads if each.next_index >= _LEAST_ENTRIES)
        return [each.where.log(each.request_id) for each in islice(long, _MOST_LOGS)]

    def _set(self, use: MemoryUse | None, size: float | None) -> None:
        if use is None:
            self._used.forget_others(set())
        else:
            self._used.series().set(use.used)
        if use is None or not use.limit:
            self._limit.forget_others(set())
        else:
            self._limit.series().set(use.limit)
        if size is not None:  # else the last one stays: what an entry takes changes with the models, not by the minute
            self._entry_size.series().set(size)
