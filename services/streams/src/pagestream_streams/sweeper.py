"""Leases, deadlines and graces: what time alone brings about, on a timer of its own in every engine and gateway."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from pagestream_streams import keys
from pagestream_streams.broker import Broker
from pagestream_streams.connection import Call
from pagestream_streams.errors import Unavailable
from pagestream_streams.keys import Partition
from pagestream_streams.scripts import SWEEP
from pagestream_streams.tasks import Periodic

_log = logging.getLogger(__name__)


class Sweeper:
    """Sweeps partitions every settings.sweep_ms. Any number of sweepers may run: a partition that was just swept is
    skipped.
    """

    def __init__(self, broker: Broker, partitions: Callable[[], Awaitable[Iterable[Partition]]]) -> None:
        """`partitions` is asked in each round."""
        self._broker = broker
        self._partitions = partitions
        self.num_reclaimed = 0
        """Requests of dead engines that this sweeper has put back."""
        self._timer = Periodic("sweeper", broker.settings.sweep_ms / 1000, self.sweep)

    def start(self) -> None:
        """Begins with a sweep at once."""
        self._timer.start()

    async def stop(self) -> None:
        """Ends the timer."""
        await self._timer.stop()

    async def sweep(self) -> None:
        """Sweeps every partition once. Unavailable, once the others are swept."""
        partitions = list(await self._partitions())
        replies = await self._broker.connection.run_each([self._call(where) for where in partitions])
        for where, reply in zip(partitions, replies, strict=True):
            if isinstance(reply, Unavailable):
                continue
            reclaimed, late, abandoned, restarted, poison = reply
            if restarted:
                _log.info(
                    "%s: nothing had swept for a while, or Redis is another process; leases and graces start anew",
                    where.prefix,
                )
            self.num_reclaimed += len(reclaimed)
            if reclaimed:
                _log.warning("%s: reclaimed %d requests of dead engines", where.prefix, len(reclaimed))
            for request_id in late:
                await self._broker.end(where, request_id.decode(), "deadline", condition="deadlines")
            for request_id in abandoned:
                await self._broker.end(where, request_id.decode(), "cancelled", condition="graces")
            for request_id, index, deaths in poison:
                await self._quarantine(where, request_id.decode(), int(index), deaths)
        away = [reply for reply in replies if isinstance(reply, Unavailable)]
        if away:
            raise away[0]

    async def _quarantine(self, where: Partition, request_id: str, index: int, deaths: int) -> None:
        message = (
            f"{deaths} engines died while they computed entry {index} of this request, the last of them running "
            "nothing else; it was quarantined"
        )
        _log.error("%s: %s", request_id, message)
        await self._broker.end(where, request_id, "error", condition="verdicts", error=f"quarantined\0{message}")

    def _call(self, where: Partition) -> Call:
        settings = self._broker.settings
        # Half an interval: sweepers that tick together don't each do the work, and one alone misses no tick.
        least = settings.sweep_ms // 2
        lease, batch, bell = settings.lease_ms, settings.sweep_batch, keys.doorbell(where.model)
        poison = settings.control_ms, settings.storm_ms
        return Call(
            SWEEP, where.prefix, (least, settings.sweep_gap_ms, lease, lease, batch, bell, where.number, *poison)
        )
