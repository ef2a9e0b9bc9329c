"""Monitors of engines, of Redis' memory and of the queue: what a gateway exports and the page at `/` shows.

Every gateway exports the queue's metrics alike, so that they exist while no engine runs.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from pagestream.v1.records_pb2 import BlockHolders, BlockMap
from pagestream_streams import Broker, GatewaySession
from pagestream_streams.admin.observation import (
    BlockMaps,
    EngineLoad,
    MemoryUse,
    ModelRow,
    QueueDepth,
    QueueState,
    entry_size,
    memory_use,
    queue_states,
    read_models,
)
from pagestream_streams.errors import StreamsError, Unavailable
from pagestream_streams.tasks import Periodic
from pagestream_telemetry import catalog
from pagestream_telemetry.catalog import Metric
from pagestream_telemetry.instruments import Registry

from pagestream_gateway.calls import RedisTimeout

MOST_MODELS = 8
MOST_ENGINES = 8
"""Of all models, whose blocks are shown: about 25 kB each."""
MOST_VIEWS = 64
"""Tenants whose views of one reading are kept."""
_STATS_FRESH_S = 0.5  # pages that ask this soon after a read get what was read
FREE, CACHED, OTHERS, HELD = 0, 1, 2, 3
"""A cell as the page gets it; HELD + i is held by `holders[i]`."""


@dataclass(frozen=True)
class _Reading:
    models: Sequence[ModelRow]
    num_models: int
    """Those included that are not read."""
    maps: Mapping[str, BlockMap | None]
    """By engine id."""
    views: dict[str, bytes] = field(default_factory=dict)
    """What was made of it, by tenant: a tenant that asks a thousand times costs one."""

    def seen_by(self, tenant: str) -> bytes:
        """Return what a tenant sees, as JSON."""
        view = self.views.get(tenant)
        if view is None:
            view = json.dumps(self._view(tenant), separators=(",", ":")).encode()
            if len(self.views) < MOST_VIEWS:
                self.views[tenant] = view
        return view

    def _view(self, tenant: str) -> dict[str, Any]:
        return {
            "num_models": self.num_models,
            "models": [
                {
                    "name": model.name,
                    "running": model.running,
                    "queues": [asdict(queue) for queue in model.queues],
                    "num_engines": len(model.engines),
                    "engines": [
                        _engine(load, self.maps[load.engine_id], tenant)
                        for load in model.engines
                        if load.engine_id in self.maps
                    ],
                }
                for model in self.models
            ],
        }


class EngineMonitor:
    """Reads engines from Redis while somebody looks: engines make maps of their blocks only then."""

    def __init__(self, broker: Broker, limit: RedisTimeout) -> None:
        self._broker = broker
        self._limit = limit
        self._maps = BlockMaps(broker.connection)
        self._reading: _Reading | Unavailable = _Reading((), 0, {})
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()

    async def view(self, tenant: str) -> bytes:
        """Return what a tenant sees, as JSON. Raises Unavailable.

        Of other tenants it sees how many requests wait and run, and which blocks they hold together: no id, no count
        of theirs in a block, and no block that it shares with them as theirs.
        """
        async with self._lock:  # one read at a time, also while Redis is away: the others get its outcome
            if time.monotonic() - self._read_at > _STATS_FRESH_S:
                try:
                    self._reading = await self._limit.wait(self._read())
                except Unavailable as error:
                    self._reading = error
                self._read_at = time.monotonic()
            reading = self._reading
        if isinstance(reading, Unavailable):
            raise Unavailable(str(reading)) from reading
        return reading.seen_by(tenant)

    async def _read(self) -> _Reading:
        names = sorted(await self._broker.directory.names())
        models = await read_models(self._broker, names[:MOST_MODELS])
        ids = [load.engine_id for model in models for load in model.engines][:MOST_ENGINES]
        maps = await self._maps.watch([model.name for model in models], ids)
        return _Reading(models, len(names), dict(zip(ids, maps, strict=True)))


def _engine(load: EngineLoad, found: BlockMap | None, tenant: str) -> dict[str, Any]:
    return {
        "id": load.engine_id,
        "running": load.running if found is None else found.num_running,
        "waiting": load.waiting if found is None else found.num_waiting,
        "kv_utilization": load.kv_utilization,
        "blocks": None if found is None else blocks_seen_by(found, tenant),
    }


def blocks_seen_by(found: BlockMap, tenant: str) -> dict[str, Any]:
    """Return a map as one tenant may see it, as JSON."""
    own = {place: index for index, place in enumerate(p for p, s in enumerate(found.sequences) if s.tenant == tenant)}
    sees_all = len(own) == len(found.sequences) == found.num_running
    seen: list[int] = []
    holders: list[dict[str, Any]] = []
    for each in found.holders:
        held = [own[place] for place in each.sequences if place in own]
        if held or sees_all:
            seen.append(HELD + len(holders))
            holders.append({"sequences": held, "count": _count(each, held, sees_all=sees_all)})
        else:
            seen.append(OTHERS)
    values = [FREE, CACHED, *seen]
    return {
        "num_blocks": found.num_blocks,
        "num_free": found.num_free,
        "num_cached": found.num_cached,
        "block_size": found.block_size,
        "cells": [values[cell] for cell in found.cells],
        "holders": holders,
        "sequences": [
            {
                "request_id": seq.request_id,
                "choice": seq.choice,
                "prompt_tokens": seq.num_prompt_tokens,
                "tokens": seq.num_tokens,
                "computed_tokens": seq.num_computed_tokens,
                "blocks": seq.num_blocks,
                "phase": "prefill" if seq.is_prefill else "decode",
            }
            for place, seq in enumerate(found.sequences)
            if place in own
        ],
        "num_prompt_tokens": found.num_prompt_tokens,
        "num_generated_tokens": found.num_generated_tokens,
        "at_ms": found.at_ms,
    }


def _count(holders: BlockHolders, held: Sequence[int], *, sees_all: bool) -> int:
    """Return how many share a block: of the tenant's own sequences where others run too."""
    return holders.num_references if sees_all else len(held)


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


_QUEUE_FRESH_S = 1.0  # a scrape this soon after a read of Redis uses what was read


class QueueMonitor:
    """Reads the queue from Redis and sets the gauges. Unknown values are not exported: old ones would look current."""

    def __init__(self, broker: Broker, registry: Registry) -> None:
        self._broker = broker
        self._by_class = {
            metric: registry.number(metric)
            for metric in (
                catalog.QUEUE_DEPTH,
                catalog.QUEUE_AGE,
                catalog.QUEUE_TAKEABLE_TOKENS,
                catalog.QUEUE_TAKEABLE_AGE,
                catalog.QUEUE_TAKEABLE_LONGEST,
                catalog.QUEUE_TAKEABLE_OUTPUT,
                catalog.QUEUE_CLAIMED_RATE,
            )
        }
        self._by_model = {
            metric: registry.number(metric)
            for metric in (
                catalog.QUEUE_TOKENS,
                catalog.QUEUE_DRAIN_RATE,
                catalog.QUEUE_CLAIMED_LONGEST,
                catalog.QUEUE_RUNNING,
            )
        }
        self._read_at = float("-inf")

    async def refresh(self, fresh_s: float = _QUEUE_FRESH_S) -> None:
        """Read the queue, unless it was read in the last `fresh_s` seconds.

        Removes all values where Redis does not answer, and those of models that Redis no longer has.
        """
        if time.monotonic() - self._read_at < fresh_s:
            return
        try:
            async with asyncio.timeout(_LIMIT_S):
                states = await queue_states(self._broker)
        except (TimeoutError, StreamsError) as error:
            logger.debug("cannot read the queue: %s", error)
            states = {}
        except Exception:
            self._set({})  # a defect, which the caller reports; old values must not outlive it
            raise
        self._read_at = time.monotonic()
        self._set(states)

    def watch(self, period_s: float) -> Periodic:
        """Return a task that reads the queue every `period_s` seconds, once it is started."""
        return Periodic("queue metrics", period_s, lambda: self.refresh(period_s / 2))

    def _set(self, states: dict[str, list[QueueState]]) -> None:
        known: set[tuple[str, ...]] = set()
        for model, partitions in states.items():
            for queue, waiting in _by_queue(partitions).items():
                known.add((model, queue))
                for metric, value in _figures(waiting).items():
                    self._by_class[metric].series(model, queue).set(value)
            self._set_sums(model, partitions)
        for instrument in self._by_class.values():
            instrument.forget_others(known)
        for instrument in self._by_model.values():
            instrument.forget_others({(model,) for model in states})

    def _set_sums(self, model: str, partitions: list[QueueState]) -> None:
        sums = {
            catalog.QUEUE_TOKENS: sum(waiting.tokens for state in partitions for waiting in state.waiting),
            catalog.QUEUE_DRAIN_RATE: sum(state.drain_rate for state in partitions),
            catalog.QUEUE_CLAIMED_LONGEST: max((state.drain_longest_rate for state in partitions), default=0.0),
            catalog.QUEUE_RUNNING: sum(state.running for state in partitions),
        }
        for metric, value in sums.items():
            self._by_model[metric].series(model).set(value)


def _figures(waiting: list[QueueDepth]) -> dict[Metric, float]:
    """Return one queue's figures over all partitions."""
    return {
        catalog.QUEUE_DEPTH: sum(each.requests for each in waiting),
        catalog.QUEUE_AGE: max(each.oldest_s for each in waiting),
        catalog.QUEUE_TAKEABLE_TOKENS: sum(each.takeable_tokens for each in waiting),
        catalog.QUEUE_TAKEABLE_AGE: max(each.takeable_oldest_s for each in waiting),
        catalog.QUEUE_TAKEABLE_LONGEST: max(each.takeable_longest for each in waiting),
        catalog.QUEUE_TAKEABLE_OUTPUT: sum(each.takeable_output_tokens for each in waiting),
        catalog.QUEUE_CLAIMED_RATE: sum(each.drain_rate for each in waiting),
    }


def _by_queue(partitions: list[QueueState]) -> dict[str, list[QueueDepth]]:
    """What waits by class over all partitions: a series for each of a thousand partitions would tell no more."""
    found: dict[str, list[QueueDepth]] = {}
    for state in partitions:
        for waiting in state.waiting:
            found.setdefault(waiting.queue, []).append(waiting)
    return found
