"""Act on what runs out: leases, deadlines and disconnect graces, on a timer in every engine and gateway.

A round takes the partitions in parts, whose replies count at once, and one that fails is where the next round goes on
(docs/design/redis.md). A model without engines and unfinished requests rests: it is swept less often.

Requests that no engine serves end here, too: where none has lived for long, and those of a model that is removed.
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
from pagestream_streams.connection.connection import Call, run_on_each
from pagestream_streams.errors import ModelInUse, ModelNotFound, RequestsUnfinished, Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import Argument
from pagestream_streams.scripts import FORGET, REGISTRY, SWEEP
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
        self.woken: set[str] = set()
        """Models that have got a request since the round began, and don't rest: whoever accepts one adds its model."""
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
        """Whether a model had neither engines nor unfinished requests at its last sweep, and has got none since."""
        return model not in self.woken and self._rests_until.get(model, 0.0) > time.monotonic()

    def awake(self, partitions: Iterable[Partition]) -> list[Partition]:
        """Return the partitions of models that don't rest."""
        now = time.monotonic()
        return [
            where for where in partitions if where.model in self.woken or self._rests_until.get(where.model, 0.0) <= now
        ]

    async def sweep(self) -> None:
        """Sweep each partition that doesn't rest, and queue the due requests to be ended.

        Unavailable once all are tried, or where the server is silent; the next round then begins behind what failed.
        """
        for model in self.woken:
            self._rests_until.pop(model, None)
        self.woken.clear()
        partitions = self.awake(await self._partitions())
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
        resting = {where.model for where in in_turn} - busy - self.woken
        now = time.monotonic()
        self._rests_until = {model: each for model, each in self._rests_until.items() if each > now}
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
        end = self._broker.end_request
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
        await broker.end_request(where, request_id, "error", condition="verdicts", error=error)

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
            view = await self._broker.engine_models.read()
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
                self._broker.end_request(
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
        *(broker.end_request(where, each, "error", condition="queued", error=error) for where, each in waiting)
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
                broker.end_request(where, request_id, "error", error=f"{MODEL_REMOVED}\0{_MESSAGE}")
                for where, request_id in unfinished[first : first + _ENDS_AT_ONCE]
            )
            await asyncio.gather(*ends)
        num_ended += len(unfinished)
    return num_ended
