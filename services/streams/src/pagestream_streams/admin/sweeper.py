"""Leases, deadlines and graces: what time alone brings about, on a timer of its own in every engine and gateway."""

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
from pagestream_streams.protocol import keys
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.tasks import Periodic

_log = logging.getLogger(__name__)

_ENDS_AT_ONCE = 32  # each waits for Redis, where the settings ask also for its disk or its replicas


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
        interval_s = broker.settings.sweep_ms / 1000
        self._timer = Periodic("sweeper", interval_s, self.sweep)
        # Beside the sweeps: they must not wait for it, or every lease and grace would start anew for the hole in them.
        self._ends = Periodic("what is due", interval_s, self._end_due)
        self._due: dict[str, Callable[[], Awaitable[object]]] = {}
        self._ending: Collection[str] = ()  # each sweep finds them due until they have ended

    def start(self) -> None:
        """Begins with a sweep at once."""
        self._timer.start()
        self._ends.start()

    async def stop(self) -> None:
        """Ends the timers. What is due and was not ended, another sweeper finds."""
        await self._timer.stop()
        await self._ends.stop()

    async def sweep(self) -> None:
        """Sweeps every partition once, and has what is due there ended soon. Unavailable, once the others are swept."""
        partitions = list(await self._partitions())
        limit_s = self._broker.settings.sweep_gap_ms / 2000  # a silent node must not make holes in the others' sweeps
        replies = await self._broker.connection.run_each([self._call(where) for where in partitions], limit_s)
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

    async def _end_due(self) -> None:
        due, self._due = self._due, {}
        self._ending = due.keys()
        calls = iter(due.values())
        try:
            results = await asyncio.gather(*(self._end_in_turn(calls) for _ in range(_ENDS_AT_ONCE)))
        finally:
            self._ending = ()
        # What could not be ended is due in the next sweep, too.
        _raise_first([each for result in results for each in result])

    async def _end_in_turn(self, calls: Iterable[Callable[[], Awaitable[object]]]) -> list[object]:
        results: list[object] = []
        for call in calls:
            try:
                results.append(await call())
            except Unavailable as error:
                results.append(error)
            except Exception:  # noqa: BLE001 - one record that can't be ended must not keep the others
                _log.exception("what is due could not be ended")
        return results

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
        times = settings.control_ms, settings.storm_ms, settings.silence_ms
        return Call(
            SWEEP, where.prefix, (least, settings.sweep_gap_ms, lease, lease, batch, bell, where.number, *times)
        )


def _raise_first(replies: Iterable[object]) -> None:
    for reply in replies:
        if isinstance(reply, Unavailable):
            raise reply
