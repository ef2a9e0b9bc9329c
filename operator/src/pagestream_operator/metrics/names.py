"""The metrics that the scaling law needs; all others are dropped. docs/autoscaling.md lists their use."""

from __future__ import annotations

from enum import Enum, StrEnum


class Combine(Enum):
    """How the values of a metric's attribute sets, from one process at one moment, are combined."""

    SUM = "sum"
    MAX = "max"


class Engine(StrEnum):
    """Metrics of engines."""

    KV_UTILIZATION = "pagestream.kv.utilization"
    RUNNING = "pagestream.requests.running"
    WAITING = "pagestream.requests.waiting"
    DRAINING = "pagestream.engine.draining"
    STARTUP = "pagestream.engine.startup.duration"
    PROMPT_TOKENS = "pagestream.tokens.prompt"
    GENERATED_TOKENS = "pagestream.tokens.generated"


class Queue(StrEnum):
    """Metrics of gateways, each of which reports the same of a model's queue."""

    DEPTH = "pagestream.queue.depth"
    TOKENS = "pagestream.queue.tokens"
    AGE = "pagestream.queue.age"
    DRAIN_RATE = "pagestream.queue.drain_rate"
    RUNNING = "pagestream.queue.running"
    TAKEABLE_TOKENS = "pagestream.queue.takeable.tokens"
    TAKEABLE_AGE = "pagestream.queue.takeable.age"
    TAKEABLE_LONGEST = "pagestream.queue.takeable.longest"
    TAKEABLE_OUTPUT = "pagestream.queue.takeable.output"
    CLAIMED_RATE = "pagestream.queue.claimed.rate"
    CLAIMED_LONGEST = "pagestream.queue.claimed.longest"


TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"  # noqa: S105 -- a metric's name
CLASS_ATTRIBUTE = "class"
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
    Queue.TAKEABLE_TOKENS: Combine.SUM,
    Queue.TAKEABLE_AGE: Combine.MAX,
    Queue.TAKEABLE_LONGEST: Combine.MAX,
    Queue.TAKEABLE_OUTPUT: Combine.SUM,
    Queue.CLAIMED_RATE: Combine.SUM,
    Queue.CLAIMED_LONGEST: Combine.MAX,
}
