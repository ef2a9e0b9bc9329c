"""The metrics that the scaling law reads; all others are dropped unread. docs/autoscaling.md lists what each is for."""

from __future__ import annotations

from enum import Enum, StrEnum


class Combine(Enum):
    """How the values of one metric's attribute sets, from one process at one moment, make one number."""

    SUM = "sum"
    MAX = "max"


class Engine(StrEnum):
    """From engines."""

    KV_UTILIZATION = "pagestream.kv.utilization"
    RUNNING = "pagestream.requests.running"
    WAITING = "pagestream.requests.waiting"
    DRAINING = "pagestream.engine.draining"
    STARTUP = "pagestream.engine.startup.duration"
    PROMPT_TOKENS = "pagestream.tokens.prompt"
    GENERATED_TOKENS = "pagestream.tokens.generated"


class Queue(StrEnum):
    """From gateways, each with the same global truth about a model's queue."""

    DEPTH = "pagestream.queue.depth"
    TOKENS = "pagestream.queue.tokens"
    AGE = "pagestream.queue.age"
    DRAIN_RATE = "pagestream.queue.drain_rate"
    RUNNING = "pagestream.queue.running"


TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"  # noqa: S105 -- a metric's name
MODEL_ATTRIBUTE = "gen_ai.request.model"

ENGINE_GAUGES: dict[str, Combine] = {
    Engine.KV_UTILIZATION: Combine.MAX,
    Engine.RUNNING: Combine.SUM,
    Engine.WAITING: Combine.SUM,
    Engine.DRAINING: Combine.MAX,
    Engine.STARTUP: Combine.MAX,
}
ENGINE_COUNTERS: frozenset[str] = frozenset({Engine.PROMPT_TOKENS, Engine.GENERATED_TOKENS})
QUEUE_GAUGES: dict[str, Combine] = {
    Queue.DEPTH: Combine.SUM,
    Queue.TOKENS: Combine.SUM,
    Queue.AGE: Combine.MAX,
    Queue.DRAIN_RATE: Combine.SUM,
    Queue.RUNNING: Combine.SUM,
}
