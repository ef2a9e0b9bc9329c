"""Unpublish a model: end what is left of its requests, and remove its card and its partitions' bookkeeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.errors import ModelInUse, ModelNotFound, RequestsUnfinished, Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.scripts import FORGET, REGISTRY

ERROR_CODE = "model_removed"
"""Code of the error with which unfinished requests end."""

_MESSAGE = "the model was removed while this request waited for an engine; send it again when the model is served"
_LISTED_AT_ONCE = 256  # ids of one partition in one reply
_ENDS_AT_ONCE = 32
_POLL_S = 0.1
_COUNT_LIMIT_S = 10.0  # a gateway that died while it counted is waited for for 2 s
_MOST_ROUNDS = 8  # of ending what came before the partitions were closed


CountEnded = Callable[[Partition], Awaitable[None]]
"""Counts what a partition's ended requests have used, see limits/ends.py. Unavailable."""


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
                broker.end(where, request_id, "error", error=f"{ERROR_CODE}\0{_MESSAGE}")
                for where, request_id in unfinished[first : first + _ENDS_AT_ONCE]
            )
            await asyncio.gather(*ends)
        num_ended += len(unfinished)
    return num_ended
