"""The metrics of engines and gateways: name, kind, unit, attributes and buckets of each.

Names that begin with `gen_ai` are those of OpenTelemetry's semantic conventions for generative AI servers, with the
buckets that these recommend. docs/telemetry.md has the same tables; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MODEL = "gen_ai.request.model"
OPERATION = "gen_ai.operation.name"
ERROR_TYPE = "error.type"


class Kind(Enum):
    """How a metric's values are read."""

    COUNTER = "counter"
    """A total that only rises, from 0 at the process' start."""
    GAUGE = "gauge"
    """The current value."""
    HISTOGRAM = "histogram"
    """Counts of observations by size, and their sum."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: in OpenTelemetry; `exposition.exposed_name` has Prometheus'.
        kind: how its values are read.
        unit: UCUM's; a word in braces names what is counted.
        text: description, exported with the metric.
        attributes: names, in the order in which a series' values are given.
        bounds: upper bounds of a histogram's buckets, rising; one more bucket has no bound.
        figure: the field of the engine's figures that it shows as it is; "" for any other metric.
    """

    name: str
    kind: Kind
    unit: str
    text: str
    attributes: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    figure: str = ""


_DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WAITS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


def _gauge(name: str, unit: str, text: str, *attributes: str, figure: str = "") -> Metric:
    return Metric(name, Kind.GAUGE, unit, text, (MODEL, *attributes), figure=figure)


def _counter(name: str, unit: str, text: str, *attributes: str, figure: str = "") -> Metric:
    return Metric(name, Kind.COUNTER, unit, text, (MODEL, *attributes), figure=figure)


def _histogram(name: str, unit: str, text: str, bounds: tuple[float, ...], *attributes: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, unit, text, (MODEL, *attributes), bounds)


# -- of engines and gateways

ERRORS = _counter("pagestream.errors", "{error}", "Errors by class.", ERROR_TYPE)
CANCELLATIONS = _counter(
    "pagestream.cancellations",
    "{request}",
    "Gateway: streams whose client left or cancelled. Engine: requests that ended from outside while it ran them.",
)
RECLAIMS = Metric(
    "pagestream.reclaims",
    Kind.COUNTER,
    "{request}",
    "Requests of dead engines that this process put back into their queues.",
)

# -- of engines

KV_UTILIZATION = _gauge(
    "pagestream.kv.utilization",
    "1",
    "Referenced blocks / all blocks: what only the cache holds does not count.",
    figure="kv_utilization",
)
KV_BLOCKS = _gauge(
    "pagestream.kv.blocks",
    "{block}",
    "Blocks of the pool: used = referenced, cached = unreferenced with content that can be found again, free = others.",
    "state",
)
KV_FRAGMENTATION = _gauge(
    "pagestream.kv.fragmentation", "1", "Slots of referenced blocks that hold no token / slots of referenced blocks."
)
PREFIX_QUERIES = _counter(
    "pagestream.prefix_cache.queries",
    "{token}",
    "Prompt tokens of new requests looked up in the prefix cache.",
    figure="prefix_query_tokens",
)
PREFIX_HITS = _counter(
    "pagestream.prefix_cache.hits",
    "{token}",
    "Prompt tokens of new requests found in the prefix cache.",
    figure="prefix_hit_tokens",
)
HOST_TIER_HITS = _counter(
    "pagestream.host_tier.hits",
    "{token}",
    "Tokens of new and of preempted requests whose blocks came from host memory.",
    figure="host_hit_tokens",
)
HOST_TIER_COPIES = _counter(
    "pagestream.host_tier.copies",
    "By",
    "KV blocks copied between the pool and host memory: saved = to host memory, loaded = back.",
    "direction",
)
HOST_TIER_PAGES = _gauge(
    "pagestream.host_tier.pages",
    "{block}",
    "Pages of host memory, each for a block: cached = with content that can be found again, free = others.",
    "state",
)
REQUESTS_RUNNING = _gauge(
    "pagestream.requests.running", "{request}", "Sequences that hold blocks.", figure="num_running"
)
REQUESTS_WAITING = _gauge(
    "pagestream.requests.waiting", "{request}", "Sequences that wait inside the engine.", figure="num_waiting"
)
BATCH_SIZE = _histogram("pagestream.batch.size", "{sequence}", "Sequences of a step.", _SIZES)
STEP_DURATION = _histogram("pagestream.step.duration", "s", "One step: schedule, model, sampling, text.", _STEPS)
TOKENS_PROMPT = _counter(
    "pagestream.tokens.prompt",
    "{token}",
    "Prompt tokens computed, those of a recomputation included.",
    figure="num_prompt_tokens",
)
TOKENS_GENERATED = _counter(
    "pagestream.tokens.generated", "{token}", "Tokens generated.", figure="num_generated_tokens"
)
PREEMPTIONS = _counter(
    "pagestream.preemptions", "{request}", "Sequences that lost their blocks to others.", figure="num_preemptions"
)
DISPLACEMENTS = _counter(
    "pagestream.displacements",
    "{request}",
    "Sequences that lost their places to requests of class 0.",
    figure="num_displaced",
)
LATE_MASKS = _counter(
    "pagestream.masks.late",
    "{row}",
    "Rows that sat a step out, because their grammar's mask was not there in time.",
    figure="num_late_masks",
)
DEGRADATION_RUNG = _gauge(
    "pagestream.degradation.rung", "1", "1 while the engine gives up what the rung says, else 0.", "rung"
)
DEGRADATION_TRANSITIONS = _counter(
    "pagestream.degradation.transitions",
    "{transition}",
    "Rungs climbed (up) and left again (down).",
    "rung",
    "direction",
)
DEGRADATION_SHARE = _gauge(
    "pagestream.degradation.share",
    "1",
    "In use / all of device (KV blocks; above 1 with what preempted sequences need again), host (memory), redis.",
    "resource",
)
DRAFTED = _counter(
    "pagestream.speculation.drafted",
    "{token}",
    "Tokens that speculation drafted and steps checked.",
    figure="num_draft_tokens",
)
ACCEPTED = _counter(
    "pagestream.speculation.accepted",
    "{token}",
    "Drafts that held, by their place among the drafts of a step, from 1.",
    "position",
)
RESUMES = _counter("pagestream.resumes", "{request}", "Claimed requests that were claimed before.")
MEMORY_USAGE = _gauge("pagestream.memory.usage", "By", "Memory of the device by use: model, kv_pool.", "kind")
GPU_UTILIZATION = _gauge("pagestream.gpu.utilization", "1", "Share of the last moments in which the GPU computed.")
GPU_MEMORY_USAGE = _gauge("pagestream.gpu.memory.usage", "By", "Memory of the GPU that is in use, by all processes.")
STARTUP_DURATION = _gauge("pagestream.engine.startup.duration", "s", "From the process' start until it claims.")
STARTUP_PART_DURATION = _gauge(
    "pagestream.engine.startup.part.duration",
    "s",
    "Of the startup's parts: process (and its child's), import (of torch), weights, cache, warm_up, join (Redis); or, "
    "after a sleep with weights, wake_up and join.",
    "part",
)
DRAINING = _gauge("pagestream.engine.draining", "1", "1 from SIGTERM to the engine's end, else 0.")
QUEUE_WAIT = _histogram("pagestream.queue.wait", "s", "From acceptance to the first claim.", _WAITS)
ENGINE_TIME_PER_OUTPUT_TOKEN = _histogram(
    "pagestream.engine.time_per_output_token", "s", "Of a sequence: from its first token on, per token.", _PER_TOKEN
)

# -- of gateways

TIME_TO_FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token", "s", "From the begin of the call, queue included.", _FIRST_TOKEN, OPERATION
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token", "s", "After the first token, per token.", _PER_TOKEN, OPERATION
)
REQUEST_DURATION = _histogram(
    "gen_ai.server.request.duration", "s", "From the begin of the call to its end.", _DURATIONS, OPERATION, ERROR_TYPE
)
INTER_TOKEN_LATENCY = _histogram(
    "pagestream.inter_token_latency", "s", "Between two arrivals of tokens in one stream.", _PER_TOKEN
)
STREAMS_OPEN = Metric("pagestream.streams.open", Kind.GAUGE, "{stream}", "Responses that are being written now.")
GATEWAY_REQUESTS = Metric(
    "pagestream.gateway.requests",
    Kind.COUNTER,
    "{call}",
    "Calls that ended, by API and outcome.",
    ("api", "outcome"),
)
GATEWAY_TOKENS = Metric("pagestream.gateway.tokens", Kind.COUNTER, "{token}", "Tokens written to clients.")
TENANT_REQUESTS = Metric(
    "pagestream.tenant.requests",
    Kind.COUNTER,
    "{request}",
    "Requests of a tenant that ended, each counted by one gateway.",
    ("tenant",),
)
TENANT_TOKENS = Metric(
    "pagestream.tenant.tokens",
    Kind.COUNTER,
    "{token}",
    "Tokens of a tenant's ended requests: prompt, cached (of these, found in a prefix cache) or output.",
    ("tenant", "type"),
)
TENANT_REFUSALS = Metric(
    "pagestream.tenant.refusals",
    Kind.COUNTER,
    "{request}",
    "Requests that a limit of a tenant or its credential has refused.",
    ("tenant", "limit"),
)
QUEUE_DEPTH = _gauge(
    "pagestream.queue.depth",
    "{request}",
    "Queued requests over all partitions. All gateways export the same value: take one, not the sum.",
    "class",
)
QUEUE_TOKENS = _gauge("pagestream.queue.tokens", "{token}", "Queued prompt tokens. All gateways export the same value.")
QUEUE_AGE = _gauge(
    "pagestream.queue.age",
    "s",
    "Age of the oldest queued request over all partitions. All gateways export the same value.",
    "class",
)
QUEUE_TAKEABLE_TOKENS = _gauge(
    "pagestream.queue.takeable.tokens",
    "{token}",
    "Queued prompt tokens of requests that a living engine may take now, by context and fingerprint; of all requests "
    "where no engine lives. All gateways export the same value.",
    "class",
)
QUEUE_TAKEABLE_AGE = _gauge(
    "pagestream.queue.takeable.age",
    "s",
    "For how long the oldest of these could have been taken. All gateways export the same value.",
    "class",
)
QUEUE_TAKEABLE_LONGEST = _gauge(
    "pagestream.queue.takeable.longest",
    "{token}",
    "Prompt tokens of the largest of these. All gateways export the same value.",
    "class",
)
QUEUE_TAKEABLE_OUTPUT = _gauge(
    "pagestream.queue.takeable.output",
    "{token}",
    "Output tokens that are expected of these, by the lengths of answers before. All gateways export the same value.",
    "class",
)
QUEUE_CLAIMED_RATE = _gauge(
    "pagestream.queue.claimed.rate",
    "{token}/s",
    "Prompt tokens that engines claim in a second, by class. All gateways export the same value.",
    "class",
)
QUEUE_CLAIMED_LONGEST = _gauge(
    "pagestream.queue.claimed.longest",
    "{token}/s",
    "The part of the drain rate that the largest claimed request makes up. All gateways export the same value.",
)
QUEUE_DRAIN_RATE = _gauge(
    "pagestream.queue.drain_rate",
    "{token}/s",
    "Prompt tokens that engines claim in a second, over the drain window. All gateways export the same value.",
)
QUEUE_RUNNING = _gauge(
    "pagestream.queue.running", "{request}", "Requests that engines own. All gateways export the same value."
)

REDIS_MEMORY_USED = Metric(
    "pagestream.redis.memory.used",
    Kind.GAUGE,
    "By",
    "Memory of Redis that counts for its limit; of a cluster's fullest node. All gateways export the same value.",
)
REDIS_MEMORY_LIMIT = Metric(
    "pagestream.redis.memory.limit",
    Kind.GAUGE,
    "By",
    "maxmemory of that server; absent where it has none. At the limit new requests and tokens are refused.",
)
REDIS_LOG_ENTRY_SIZE = Metric(
    "pagestream.redis.log.entry_size",
    Kind.GAUGE,
    "By",
    "Memory of Redis for a token in a log, measured at logs that this gateway reads; absent until it read a long one.",
)

ENGINE_METRICS = (
    KV_UTILIZATION,
    KV_BLOCKS,
    KV_FRAGMENTATION,
    PREFIX_QUERIES,
    PREFIX_HITS,
    HOST_TIER_HITS,
    HOST_TIER_COPIES,
    HOST_TIER_PAGES,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    BATCH_SIZE,
    STEP_DURATION,
    TOKENS_PROMPT,
    TOKENS_GENERATED,
    PREEMPTIONS,
    DISPLACEMENTS,
    LATE_MASKS,
    DEGRADATION_RUNG,
    DEGRADATION_TRANSITIONS,
    DEGRADATION_SHARE,
    DRAFTED,
    ACCEPTED,
    RESUMES,
    RECLAIMS,
    CANCELLATIONS,
    ERRORS,
    MEMORY_USAGE,
    GPU_UTILIZATION,
    GPU_MEMORY_USAGE,
    STARTUP_DURATION,
    STARTUP_PART_DURATION,
    DRAINING,
    QUEUE_WAIT,
    ENGINE_TIME_PER_OUTPUT_TOKEN,
)
GATEWAY_METRICS = (
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    REQUEST_DURATION,
    INTER_TOKEN_LATENCY,
    STREAMS_OPEN,
    GATEWAY_REQUESTS,
    GATEWAY_TOKENS,
    TENANT_REQUESTS,
    TENANT_TOKENS,
    TENANT_REFUSALS,
    ERRORS,
    CANCELLATIONS,
    RECLAIMS,
    QUEUE_DEPTH,
    QUEUE_TOKENS,
    QUEUE_AGE,
    QUEUE_TAKEABLE_TOKENS,
    QUEUE_TAKEABLE_AGE,
    QUEUE_TAKEABLE_LONGEST,
    QUEUE_TAKEABLE_OUTPUT,
    QUEUE_CLAIMED_RATE,
    QUEUE_CLAIMED_LONGEST,
    QUEUE_DRAIN_RATE,
    QUEUE_RUNNING,
    REDIS_MEMORY_USED,
    REDIS_MEMORY_LIMIT,
    REDIS_LOG_ENTRY_SIZE,
)
