"""OTLP messages, converted to the values that the store works on, and the metrics that are read.

All others are dropped. docs/autoscaling.md lists their use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import pairwise
from typing import TypeAlias

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource


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


Attributes: TypeAlias = tuple[tuple[str, str], ...]

RELEASE_ATTRIBUTE = "pagestream.release"

_NO_RECORDED_VALUE = metrics_pb2.DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_DELTA = metrics_pb2.AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
_CUMULATIVE = metrics_pb2.AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
_MOST_BOUNDS = 256
"""Of a histogram; those of the semantic conventions have 16."""
_TEXT_LENGTH = 256
"""Characters of an attribute; longer ones are cut."""
_NAME_LENGTH = 253
"""Characters of a Kubernetes name; a longer one can't be a pod's."""


@dataclass(frozen=True, slots=True)
class Source:
    """The process that exported a metric, by its resource attributes; "" where one is missing."""

    namespace: str
    pool: str
    pod: str
    uid: str
    instance: str
    release: str = ""
    """The release of Pagestream that the process belongs to."""

    @property
    def name(self) -> str:
        """The pod's name; outside a cluster that of the instance."""
        return self.pod or self.instance


@dataclass(frozen=True, slots=True)
class Number:
    """One point of a gauge or sum. Times in s; `start_s` is 0 where the exporter gave none."""

    attributes: Attributes
    start_s: float
    time_s: float
    value: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """One point of a histogram with explicit bounds; `counts` has one entry more than `bounds`."""

    attributes: Attributes
    start_s: float
    time_s: float
    bounds: tuple[float, ...]
    counts: tuple[int, ...]


_IDENTITY = {
    "k8s.namespace.name": "namespace",
    "pagestream.pool": "pool",
    "k8s.pod.name": "pod",
    "k8s.pod.uid": "uid",
    "service.instance.id": "instance",
    RELEASE_ATTRIBUTE: "release",
}


def source_of(resource: Resource) -> Source | None:
    """Return the exporting process; None if it names neither a pod nor an instance, or a name is too long."""
    found = dict.fromkeys(_IDENTITY.values(), "")
    for attribute in resource.attributes:
        field = _IDENTITY.get(attribute.key)
        if field is not None:
            found[field] = attribute.value.string_value
    if any(len(value) > _NAME_LENGTH for value in found.values()):
        return None
    source = Source(**found)
    return source if source.name else None


def attributes_of(attributes: Iterable[KeyValue]) -> Attributes:
    """Return the attributes of a point, sorted."""
    return tuple(
        sorted((attribute.key[:_TEXT_LENGTH], _text(attribute.value)[:_TEXT_LENGTH]) for attribute in attributes)
    )


def _text(value: AnyValue) -> str:
    kind = value.WhichOneof("value")
    return str(getattr(value, kind)) if kind is not None else ""


def number_of(point: metrics_pb2.NumberDataPoint) -> Number | None:
    """Convert a point; None if it has no value (a staleness marker) or no time."""
    kind = point.WhichOneof("value")
    if kind is None or point.flags & _NO_RECORDED_VALUE or point.time_unix_nano == 0:
        return None
    value = float(point.as_int) if kind == "as_int" else point.as_double
    attributes = attributes_of(point.attributes) if point.attributes else ()
    return Number(attributes, point.start_time_unix_nano / 1e9, point.time_unix_nano / 1e9, value)


def histogram_of(point: metrics_pb2.HistogramDataPoint) -> Histogram | None:
    """Convert a point; None if it has no time, or buckets that don't fit its bounds."""
    bounds, counts = tuple(point.explicit_bounds), tuple(point.bucket_counts)
    rising = all(low < high for low, high in pairwise(bounds))
    fits = len(counts) == len(bounds) + 1 and len(bounds) <= _MOST_BOUNDS
    if point.time_unix_nano == 0 or not fits or not rising or not all(map(math.isfinite, bounds)):
        return None
    start_s, time_s = point.start_time_unix_nano / 1e9, point.time_unix_nano / 1e9
    return Histogram(attributes_of(point.attributes), start_s, time_s, bounds, counts)


def is_delta(temporality: int) -> bool | None:
    """Whether points count since the previous one (True) or since a start (False); None: neither."""
    if temporality == _DELTA:
        return True
    return False if temporality == _CUMULATIVE else None


def is_stale(point: metrics_pb2.HistogramDataPoint) -> bool:
    """Whether a point is a staleness marker: the series has ended."""
    return bool(point.flags & _NO_RECORDED_VALUE)
