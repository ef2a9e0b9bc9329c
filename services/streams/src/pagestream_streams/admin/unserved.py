"""End requests that no engine has taken, where no engine of their model has lived for long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from pagestream_streams.admin.broker import Broker
from pagestream_streams.errors import ModelNotFound, Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.scripts import REGISTRY
from pagestream_streams.tasks import Periodic

_log = logging.getLogger(__name__)

_PERIOD_S = 5.0
_CLASSES = (0, 1, 2)
_AT_ONCE = 32
_MOST_A_QUEUE = 256  # of one round; a later one ends the others

ERROR_CODE = "no_engine"
MODEL_UNAVAILABLE = "model_unavailable"
"""Code of requests whose model no engine can load."""


class UnservedRequests:
    """Ends requests without a deadline that wait for a model without engines.

    Each process that runs it counts for itself how long it has seen no engine; it counts anew after an outage of Redis,
    in which engines' leases may have run out. Any number of processes may run it.
    """

    def __init__(self, broker: Broker, limit_s: float, *, period_s: float = _PERIOD_S) -> None:
        """Create it stopped. `limit_s`: seconds without an engine, and in the queue, after which a request is ended."""
        self._broker = broker
        self._limit_s = limit_s
        self._absent_since: dict[str, float] = {}
        self._timer = Periodic("end unserved requests", min(period_s, limit_s / 4), self.end_due)

    def start(self) -> None:
        """Look for such requests periodically in the background."""
        self._timer.start()

    async def stop(self) -> None:
        """Stop looking."""
        await self._timer.stop()

    async def end_due(self) -> None:
        """Look once, and end what is due. Unavailable."""
        try:
            models = await self._broker.models()
            now = time.monotonic()
            view = await self._broker.roster.read()
            awaited = view.awaited
            absent = {info.name for info in models if not info.engines and info.name not in awaited}
            self._absent_since = {name: self._absent_since.get(name, now) for name in absent}
            due = [name for name, since in self._absent_since.items() if now - since >= self._limit_s]
            for name in due:
                reason = view.reason(name)
                if reason is not None:
                    await refuse_waiting(self._broker, name, reason)
                await self._end_all(name, sleeps=name in view.loadable)
        except Unavailable:
            self._absent_since.clear()
            raise

    async def _end_all(self, name: str, *, sleeps: bool) -> None:
        try:
            partitions = await self._broker.directory.all_partitions(name)
        except ModelNotFound:  # was unpublished meanwhile
            return
        least_age_ms = round(self._limit_s * 1000)
        why = " (its engines sleep until an operator wakes them)" if sleeps else ""
        message = (
            f"no engine has served the model {name!r} for {self._limit_s:g} s{why}, and the request had no deadline of "
            "its own; send it again when the list of models shows engines"
        )
        waiting = await _waiting(self._broker, partitions, least_age_ms)
        num_ended = 0
        for first in range(0, len(waiting), _AT_ONCE):
            ends = (
                self._broker.end(
                    where,
                    request_id,
                    "deadline",
                    condition="unclaimed",
                    error=f"{ERROR_CODE}\0{message}",
                    least_age_ms=least_age_ms,
                )
                for where, request_id in waiting[first : first + _AT_ONCE]
            )
            num_ended += sum(ended is not None for ended in await asyncio.gather(*ends))
        if num_ended:
            _log.warning("%s: ended %d requests that no engine has taken for %g s", name, num_ended, self._limit_s)


async def refuse_waiting(broker: Broker, name: str, reason: str) -> int:
    """End the queued requests of a model, also begun ones, since no engine can load it. Unavailable.

    Only after the model has had no engine for long: a pool without a list of models may serve it, too.

    Returns:
        How many were due; 0 also where an engine serves the model after all.
    """
    try:
        partitions = await broker.directory.all_partitions(name)
    except ModelNotFound:  # was unpublished meanwhile
        return 0
    if await broker.connection.run(REGISTRY, broker.connection.keyspace.engines(name), "", 0):
        return 0
    waiting = (await _waiting(broker, partitions, 0, await _begun(broker, partitions)))[:_MOST_A_QUEUE]
    error = f"{MODEL_UNAVAILABLE}\0the model {name!r} can't be loaded: {reason}"
    await asyncio.gather(
        *(broker.end(where, each, "error", condition="queued", error=error) for where, each in waiting)
    )
    return len(waiting)


async def _begun(broker: Broker, partitions: list[Partition]) -> list[tuple[Partition, str]]:
    """Return the queues of begun requests: that of none, and those of fingerprints."""
    prints = await broker.connection.pipeline([("HGET", f"{where.prefix}meta", "prints") for where in partitions])
    names = [("", *(f":{each.decode()}" for each in (found or b"").split())) for found in prints]
    return [
        (where, f"{where.prefix}queue:resume{each}")
        for where, found in zip(partitions, names, strict=True)
        for each in found
    ]


async def _waiting(
    broker: Broker, partitions: list[Partition], least_age_ms: int, begun: Sequence[tuple[Partition, str]] = ()
) -> list[tuple[Partition, str]]:
    """Return the oldest queued requests of that age, also those of the queues of `begun`."""
    seconds, micros = await broker.connection.execute("TIME")
    until = int(seconds) * 1000 + int(micros) // 1000 - least_age_ms
    queues = [(where, f"{where.prefix}queue:{number}") for where in partitions for number in _CLASSES]
    queues += begun
    replies = await broker.connection.pipeline(
        [("XRANGE", queue, "-", until, "COUNT", _MOST_A_QUEUE) for _, queue in queues]
    )
    return [
        (where, fields[b"id"].decode())
        for (where, _), entries in zip(queues, replies, strict=True)
        for _, fields in entries
    ]
