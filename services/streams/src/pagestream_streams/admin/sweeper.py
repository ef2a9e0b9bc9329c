"""Act on leases, deadlines and disconnect graces that run out, on a timer in every engine and gateway.

A round takes the partitions in parts, whose replies count at once, and one that fails is where the next round goes on
(docs/design/redis.md). A model without engines and unfinished requests rests: it is swept less often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from pagestream.v1.records_pb2 import RequestSpec

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import run_on_each
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import Argument
from pagestream_streams.scripts import SWEEP
from pagestream_streams.tasks import Periodic

_log = logging.getLogger(__name__)

_PARTITIONS_AT_ONCE = 256  # on a server that is no cluster: four runs of the script, each 0.5 ms or more of Redis
_REST_ROUNDS = 7  # between two sweeps of what rests; what a gateway accepted there that died at once waits so long
_ENDS_AT_ONCE = 32  # each waits for Redis, where the settings ask also for its disk or its replicas


class Sweeper:
    """Sweeps partitions every settings.sweep_ms.

    Any number of sweepers may run: the script skips a partition that was just swept.
    """

    def __init__(
        self,
        broker: Broker,
        partitions: Callable[[], Awaitable[Iterable[Partition]]],
        on_ends: Callable[[Partition], None] = lambda _where: None,
    ) -> None:
        """Create it stopped.

        `partitions` is called in each round, `on_ends` with each partition where ended requests wait to be counted.
        """
        self._on_ends = on_ends
        self._broker = broker
        self._partitions = partitions
        self.num_reclaimed = 0
        """Requests of dead engines that this sweeper has returned to their queues."""
        interval_s = broker.settings.sweep_ms / 1000
        self._rest_s = _REST_ROUNDS * interval_s
        self._rests_until: dict[str, float] = {}  # by model, on time.monotonic()
        self._woken: set[str] = set()  # models that have got a request since the round began
        self._start = 0  # index of the partition with which the next round begins
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

    def is_resting(self, model: str) -> bool:
        """Whether a model had neither engines nor unfinished requests at its last sweep."""
        return self._rests_until.get(model, 0.0) > time.monotonic()

    def wake(self, model: str) -> None:
        """Note that a model gets a request."""
        self._woken.add(model)
        self._rests_until.pop(model, None)

    async def sweep(self) -> None:
        """Sweep each partition that doesn't rest, and queue the due requests to be ended.

        Unavailable once all are tried, or where the server is silent; the next round then begins behind what failed.
        """
        self._woken.clear()
        partitions = [where for where in await self._partitions() if not self.is_resting(where.model)]
        start = self._start % len(partitions) if partitions else 0
        self._start = 0
        in_turn = partitions[start:] + partitions[:start]
        busy: set[str] = set()
        # A cluster's nodes must not wait for a silent one, so its partitions are one part.
        size = max(1, len(partitions)) if self._broker.connection.is_cluster else _PARTITIONS_AT_ONCE
        for first in range(0, len(in_turn), size):
            part = in_turn[first : first + size]
            replies = await self._sweep_part(part)
            busy |= {where.model for where, is_busy in zip(part, replies, strict=True) if is_busy}
            failure = next((reply for reply in replies if isinstance(reply, Unavailable)), None)
            if failure is not None:
                self._start = start + first + size
                raise failure
        until = time.monotonic() + self._rest_s
        resting = {where.model for where in in_turn} - busy - self._woken
        self._rests_until = {model: each for model, each in self._rests_until.items() if self.is_resting(model)}
        self._rests_until.update(dict.fromkeys(resting, until))

    async def _sweep_part(self, partitions: Sequence[Partition]) -> list[bool | Unavailable]:
        """Sweep some partitions; return whether each has an engine or an unfinished request."""
        limit_s = self._broker.settings.sweep_gap_ms / 2000  # a silent node must not delay the others' next sweep
        replies = await run_on_each(self._broker.connection, SWEEP, partitions, self._arguments(), limit_s)
        found: list[bool | Unavailable] = []
        for where, reply in zip(partitions, replies, strict=True):
            if isinstance(reply, Unavailable):
                found.append(reply)
                continue
            reclaimed, late, abandoned, restarted, poison, is_busy, num_ended = reply
            found.append(bool(is_busy))
            if num_ended:
                self._on_ends(where)
            if restarted and is_busy:
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
        return found

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
        broker, error = self._broker, f"quarantined\0{message}"
        record = await broker.connection.execute("HGET", where.request(request_id), "spec")
        if record is not None:  # before its end, after which nobody would come back to it
            await broker.note_poison(RequestSpec.FromString(record))
        await broker.end(where, request_id, "error", condition="verdicts", error=error)

    def _arguments(self) -> Sequence[Argument]:
        settings = self._broker.settings
        # Half an interval: of sweepers that tick together only one does the work, and a single one skips no tick.
        least = settings.sweep_ms // 2
        lease, batch = settings.lease_ms, settings.sweep_batch
        times = settings.control_ms, settings.storm_ms, settings.silence_ms
        return least, settings.sweep_gap_ms, lease, lease, batch, *times


def _raise_first(replies: Iterable[object]) -> None:
    for reply in replies:
        if isinstance(reply, Unavailable):
            raise reply
