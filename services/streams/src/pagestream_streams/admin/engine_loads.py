"""What living engines publish of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.protocol.records import CONTEXT_FIELD
from pagestream_streams.scripts import REGISTRY

_FIELDS = ("running", "waiting", "kv_utilization", CONTEXT_FIELD)


@dataclass(frozen=True)
class EngineLoad:
    """An engine's load at its last heartbeat."""

    engine_id: str
    running: int | None
    """Sequences that hold KV blocks; None where the engine has published nothing yet, as are the others."""
    waiting: int | None
    """Sequences that wait inside the engine."""
    kv_utilization: float | None
    """Referenced blocks / all blocks."""
    max_model_len: int | None
    """Longest context in tokens; 0 for any."""


async def read_engine_loads(broker: Broker, models: Sequence[str]) -> dict[str, list[EngineLoad]]:
    """Return the living engines of each model, ordered by their ids, in two round trips. Unavailable."""
    connection, keyspace = broker.connection, broker.connection.keyspace
    found = await connection.run_many([Call(REGISTRY, keyspace.engines(name), ("", 0)) for name in models])
    ids = [sorted(each.decode() for each in living) for living in found]
    commands = [("HMGET", keyspace.engine(each), *_FIELDS) for living in ids for each in living]
    loads = iter(await connection.pipeline(commands) if commands else [])
    return {name: [_load(each, next(loads)) for each in living] for name, living in zip(models, ids, strict=True)}


def _load(engine_id: str, values: Sequence[bytes | None]) -> EngineLoad:
    running, waiting, utilization, context = values
    return EngineLoad(
        engine_id,
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        None if utilization is None else float(utilization),
        None if context is None else int(context),
    )
