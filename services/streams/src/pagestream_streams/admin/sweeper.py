"""Act on leases, deadlines and disconnect graces that run out, on a timer in every engine and gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.connection.scripts import SWEEP
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.tasks import Periodic

_log = logging.getLogger(__name__)

_ENDS_AT_ONCE = 32  # each waits for Redis, where the settings ask also for its disk or its replicas


class Sweeper:
    """Sweeps partitions every settings.sweep_ms.

    Any number of sweepers may run: the script skips a partition that was just swept.
    """

    def __init__(self, broker: Broker, partitions: Callable[[], Awaitable[Iterable[Partition]]]) -> None:
        """Create it stopped. `partitions` is called in each round."""
        self._broker = broker
        self._partitions = partitions
        self.num_reclaimed = 0
        """Requests of dead engines that this sweeper has returned to their queues."""
        interval_s = broker.settings.sweep_ms / 1000
        self._timer = Periodic("sweeper", interval_s, self.sweep)
        # On a second timer: a sweep that waits for it would leave a hole, after which all leases and graces start anew.
        self._ends = Periodic("end due requests", interval_s, self.end_due)
        self._due: dict[str, Callable[[], Awaitable[object]]] = {}
        self._ending: Collection[str] = ()  # sweeps find them due until they have ended

    def start(self) -> None:
        """Sweep at once, then periodically in the background."""
        self._timer.start()
        self._ends.start()

    async def stop(self) -> None:
        """Stop both timers. Due requests that were not ended are found by another sweeper."""
        await self._timer.stop()
        await self._ends.stop()

    async def sweep(self) -> None:
        """Sweep every partition once, and queue the due requests to be ended. Unavailable once all are tried."""
        partitions = list(await self._partitions())
        limit_s = self._broker.settings.sweep_gap_ms / 2000  # a silent node must not delay the others' next sweep
        replies = await self._broker.connection.run_each([self._call(where) for where in partitions], limit_s)
        for where, reply in zip(partitions, replies, strict=True):
            if isinstance(reply, Unavailable):
                continue
            reclaimed, late, abandoned, restarted, poison = reply
            if restarted:
                _log.info(
                    "%s: no sweep for longer than sweep_gap_ms, or Redis has restarted; leases and graces start anew",
                    where.prefix,
                )
            self.num_reclaimed += len(reclaimed)
            if reclaimed:
                _log.warning("%s: reclaimed %d requests of dead engines", where.prefix, len(reclaimed))
            self._note_due(where, late, abandoned, poison)
        if self._due:
            self._ends.nudge()
        _raise_first(replies)

    def _note_due(
        self, where: Partition, late: Iterable[bytes], abandoned: Iterable[bytes], poison: Iterable[Sequence[Any]]
    ) -> None:
        end = self._broker.end
        due: dict[str, Callable[[], Awaitable[object]]] = {}
        for name in map(bytes.decode, late):
            due[name] = partial(end, where, name, "deadline", condition="deadlines")
        for name in map(bytes.decode, abandoned):
            due[name] = partial(end, where, name, "cancelled", condition="graces")
        for request_id, index, deaths in poison:
            name = request_id.decode()
            due[name] = partial(self._quarantine, where, name, int(index), deaths)
        self._due.update({name: call for name, call in due.items() if name not in self._ending})

    async def end_due(self) -> None:
        """End the requests that sweeps have found due. Unavailable once all are tried."""
        due, self._due = self._due, {}
        self._ending = due.keys()
        calls = iter(due.values())
        try:
            results = await asyncio.gather(*(self._end_in_turn(calls) for _ in range(_ENDS_AT_ONCE)))
        finally:
            self._ending = ()
        # The next sweep returns again what could not be ended.
        _raise_first([each for result in results for each in result])

    async def _end_in_turn(self, calls: Iterable[Callable[[], Awaitable[object]]]) -> list[object]:
        results: list[object] = []
        for call in calls:
            try:
                results.append(await call())
            except Unavailable as error:
                results.append(error)
            except Exception:  # noqa: BLE001 - one bad record must not block the others
                _log.exception("a due request could not be ended")
        return results

    async def _quarantine(self, where: Partition, request_id: str, index: int, deaths: int) -> None:
        message = (
            f"{deaths} engines died while they computed entry {index} of this request, the last one while it ran "
            "nothing else; the request was quarantined"
        )
        _log.error("%s: %s", request_id, message)
        await self._broker.end(where, request_id, "error", condition="verdicts", error=f"quarantined\0{message}")

    def _call(self, where: Partition) -> Call:
        settings = self._broker.settings
        # Half an interval: of sweepers that tick together only one does the work, and a single one skips no tick.
        least = settings.sweep_ms // 2
        lease, batch, bell = settings.lease_ms, settings.sweep_batch, where.doorbell
        times = settings.control_ms, settings.storm_ms, settings.silence_ms
        return Call(
            SWEEP, where.prefix, (least, settings.sweep_gap_ms, lease, lease, batch, bell, where.number, *times)
        )


def _raise_first(replies: Iterable[object]) -> None:
    for reply in replies:
        if isinstance(reply, Unavailable):
            raise reply
