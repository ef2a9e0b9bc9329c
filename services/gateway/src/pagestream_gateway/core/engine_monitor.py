"""What the page at `/` shows of engines: their queues, batches and KV blocks, as one tenant may see them."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pagestream.v1.records_pb2 import BlockHolders, BlockMap
from pagestream_streams import Broker
from pagestream_streams.admin.observation import BlockMaps, EngineLoad, ModelRow, read_models
from pagestream_streams.errors import Unavailable

from pagestream_gateway.core.redis_timeout import RedisTimeout

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
