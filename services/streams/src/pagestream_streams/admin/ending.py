"""End requests that no engine serves: where none has lived for long, and of a model that is removed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.errors import ModelInUse, ModelNotFound, RequestsUnfinished, Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.scripts import FORGET, REGISTRY
from pagestream_streams.tasks import Periodic

_log = logging.getLogger(__name__)

_PERIOD_S = 5.0
_CLASSES = (0, 1, 2)
_AT_ONCE = 32
_MOST_A_QUEUE = 256  # of one round; a later one ends the others

NO_ENGINE = "no_engine"
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
                    error=f"{NO_ENGINE}\0{message}",
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


MODEL_REMOVED = "model_removed"
"""Code of the error with which unfinished requests end."""

_MESSAGE = "the model was removed while this request waited for an engine; send it again when the model is served"
_LISTED_AT_ONCE = 256  # ids of one partition in one reply
_ENDS_AT_ONCE = 32
_POLL_S = 0.1
_COUNT_LIMIT_S = 10.0  # a gateway that died while it counted is waited for for 2 s
_MOST_ROUNDS = 8  # of ending what came before the partitions were closed


CountEnded = Callable[[Partition], Awaitable[None]]
"""Counts what a partition's ended requests have used, see limits.py. Unavailable."""


async def unpublish(
    broker: Broker,
    name: str,
    *,
    end_requests: bool = False,
    wait_s: float = 0.0,
    count_ended: CountEnded | None = None,
) -> int:
    """Remove a model that no engine serves. It can be published anew, also with another number of partitions.

    Gateways forget it within settings.directory_ttl_s; this takes twice as long, and ends what they accept meanwhile.
    Logs of finished requests can be read until their retention ends. Repeat it after any error: it goes on where it
    stopped.

    Args:
        broker: the process' connection to Redis.
        end_requests: end unfinished requests with the error `model_removed`.
        wait_s: seconds to wait for engines that still live to go.
        count_ended: counts ends that no gateway has counted yet. Without it their usage is lost.

    Returns:
        The number of requests that were ended.

    Raises:
        ModelNotFound: it is not published.
        ModelInUse: engines serve it, or still finish requests of it; or it was published again meanwhile. It stays
            published.
        RequestsUnfinished: requests wait, and `end_requests` is not set: it stays published. Or gateways of an
            earlier version go on accepting requests.
        Unavailable: a retry is harmless. Also where usage could not be counted within some seconds.
    """
    connection, directory = broker.connection, broker.directory
    count = await directory.stored_partitions(name)
    if count is None:
        raise ModelNotFound(name)
    partitions = [connection.keyspace.partition(name, number) for number in range(count)]
    await _wait_for_engines(broker, name, partitions, wait_s)
    if not end_requests:
        unfinished = await _unfinished(broker, partitions)
        if unfinished:
            raise RequestsUnfinished(name, len(unfinished))
    await directory.withdraw(name)
    num_ended = await _end_all(broker, partitions)
    await asyncio.sleep(2 * broker.settings.directory_ttl_s)
    num_ended += await _close(broker, name, partitions, count_ended)
    if not await directory.forget(name):
        raise ModelInUse(name)
    return num_ended


async def _close(
    broker: Broker, name: str, partitions: Sequence[Partition], count_ended: CountEnded | None = None
) -> int:
    """Have the partitions take nothing new, and delete what they keep; return how many requests were ended."""
    num_ended, retention_ms = 0, broker.settings.dead_retention_s * 1000
    for _ in range(_MOST_ROUNDS):
        await _wait_for_engines(broker, name, partitions, 0.0)
        if await broker.directory.is_published(name):
            raise ModelInUse(name)
        num_ended += await _end_all(broker, partitions)
        if count_ended is not None:
            await _count_all(broker, partitions, count_ended)
        left = await _unfinished(broker, partitions, retention_ms)
        if not left:
            return num_ended
    raise RequestsUnfinished(name, len(left))


async def _count_all(broker: Broker, partitions: Sequence[Partition], count_ended: CountEnded) -> None:
    """Have all ends counted, here or by the gateway that is at it."""
    until = time.monotonic() + _COUNT_LIMIT_S
    for where in partitions:
        while left := int(await broker.connection.execute("XLEN", f"{where.prefix}ended")):
            await count_ended(where)
            if time.monotonic() > until:
                raise Unavailable(f"what {left} ended requests of {where.model!r} have used is not counted yet")
            await asyncio.sleep(_POLL_S)


async def _wait_for_engines(broker: Broker, name: str, partitions: Sequence[Partition], limit_s: float) -> None:
    """Wait for the engines in the registry, and for retired ones, which have a lease until they have finished."""
    keys = [broker.connection.keyspace.engines(name), *(where.leases for where in partitions)]
    until = time.monotonic() + limit_s
    while True:
        found = await broker.connection.run_many([Call(REGISTRY, key, ("", 0)) for key in keys])
        living = {engine for engines in found for engine in engines}
        if not living:
            return
        if time.monotonic() > until:
            raise ModelInUse(name, [engine.decode() for engine in living])
        await asyncio.sleep(_POLL_S)


async def _unfinished(
    broker: Broker, partitions: Sequence[Partition], retention_ms: int | None = None
) -> list[tuple[Partition, str]]:
    """Return unfinished requests; with `retention_ms`, close the partitions and forget those that have none."""
    arguments = _LISTED_AT_ONCE, "" if retention_ms is None else retention_ms
    calls = [Call(FORGET, where.prefix, arguments) for where in partitions]
    replies = await broker.connection.run_many(calls)
    return [(where, found.decode()) for where, ids in zip(partitions, replies, strict=True) for found in ids]


async def _end_all(broker: Broker, partitions: Sequence[Partition]) -> int:
    num_ended = 0
    while unfinished := await _unfinished(broker, partitions):
        for first in range(0, len(unfinished), _ENDS_AT_ONCE):
            ends = (
                broker.end(where, request_id, "error", error=f"{MODEL_REMOVED}\0{_MESSAGE}")
                for where, request_id in unfinished[first : first + _ENDS_AT_ONCE]
            )
            await asyncio.gather(*ends)
        num_ended += len(unfinished)
    return num_ended
