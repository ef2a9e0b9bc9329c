"""The models of a deployment with their queues and engines, for people who look on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pagestream_streams.admin.broker import Broker
from pagestream_streams.admin.engine_loads import EngineLoad, read_engine_loads
from pagestream_streams.admin.queues import QueueState, queue_states


@dataclass(frozen=True)
class QueueRow:
    """A queue of a model, over all partitions."""

    name: str
    """A priority class, "resume" or "suspect"."""
    requests: int
    tokens: int
    """Of their prompts."""
    oldest_s: float
    drain_rate: float
    """Prompt tokens a second that engines take from it."""


@dataclass(frozen=True)
class ModelRow:
    """A model."""

    name: str
    running: int
    """Requests that engines have claimed."""
    engines: Sequence[EngineLoad]
    queues: Sequence[QueueRow]


async def read_models(broker: Broker, only: Collection[str] | None = None) -> list[ModelRow]:
    """Return the models by name, in a few round trips. Unavailable.

    `only`: names of the models to read; None for all.
    """
    states = await queue_states(broker, only)
    loads = await read_engine_loads(broker, list(states))
    return [
        ModelRow(name, sum(each.running for each in found), loads[name], _queues(found))
        for name, found in sorted(states.items())
    ]


def _queues(states: Sequence[QueueState]) -> list[QueueRow]:
    names = sorted({each.queue for state in states for each in state.waiting})
    rows = []
    for name in names:
        parts = [each for state in states for each in state.waiting if each.queue == name]
        oldest_s = max(each.oldest_s for each in parts)
        drain_rate = sum(each.drain_rate for each in parts)
        rows.append(
            QueueRow(name, sum(p.requests for p in parts), sum(p.tokens for p in parts), round(oldest_s, 3), drain_rate)
        )
    return rows
