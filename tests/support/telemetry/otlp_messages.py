"""OTLP messages as engines and gateways export them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

MODEL = {"gen_ai.request.model": "demo"}
DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
UNSPECIFIED = AggregationTemporality.AGGREGATION_TEMPORALITY_UNSPECIFIED


def nanos(seconds: float) -> int:
    return round(seconds * 1e9)


def attributes(values: Mapping[str, str]) -> list[KeyValue]:
    return [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in values.items()]


def gauge(name: str, time_s: float, value: float, labels: Mapping[str, str] = MODEL) -> Metric:
    point = NumberDataPoint(attributes=attributes(labels), time_unix_nano=nanos(time_s), as_double=value)
    return Metric(name=name, gauge=Gauge(data_points=[point]))


def total(
    name: str,
    start_s: float,
    time_s: float,
    value: int,
    temporality: AggregationTemporality.ValueType = CUMULATIVE,
    *,
    labels: Mapping[str, str] = MODEL,
    monotonic: bool = True,
) -> Metric:
    point = NumberDataPoint(
        attributes=attributes(labels), start_time_unix_nano=nanos(start_s), time_unix_nano=nanos(time_s), as_int=value
    )
    return Metric(name=name, sum=Sum(data_points=[point], aggregation_temporality=temporality, is_monotonic=monotonic))


def histogram(  # noqa: PLR0917 -- as a point is said
    name: str,
    start_s: float,
    time_s: float,
    bounds: Sequence[float],
    counts: Sequence[int],
    temporality: AggregationTemporality.ValueType = CUMULATIVE,
    *,
    labels: Mapping[str, str] = MODEL,
) -> Metric:
    point = HistogramDataPoint(
        attributes=attributes(labels),
        start_time_unix_nano=nanos(start_s),
        time_unix_nano=nanos(time_s),
        explicit_bounds=bounds,
        bucket_counts=counts,
        count=sum(counts),
    )
    return Metric(name=name, histogram=Histogram(data_points=[point], aggregation_temporality=temporality))


def resource(metrics: Iterable[Metric], **identity: str) -> ResourceMetrics:
    """`identity` by short names: namespace, pool, pod, uid, instance, release."""
    keys = {
        "namespace": "k8s.namespace.name",
        "pool": "pagestream.pool",
        "pod": "k8s.pod.name",
        "uid": "k8s.pod.uid",
        "instance": "service.instance.id",
        "release": "pagestream.release",
    }
    named = {keys[name]: value for name, value in identity.items()}
    return ResourceMetrics(
        resource=Resource(attributes=attributes(named)), scope_metrics=[ScopeMetrics(metrics=list(metrics))]
    )


def engine(
    time_s: float, *metrics: Metric, utilization: float = 0.5, running: float = 3, pod: str = "pod-0", **identity: str
) -> ResourceMetrics:
    """One export of an engine of pool `demo` in the namespace `ns`, and further metrics."""
    own = [
        gauge("pagestream.kv.utilization", time_s, utilization),
        gauge("pagestream.requests.running", time_s, running),
        gauge("pagestream.requests.waiting", time_s, 1),
    ]
    return resource([*own, *metrics], **{"namespace": "ns", "pool": "demo", "pod": pod, "instance": pod} | identity)


def gateway(
    time_s: float, *metrics: Metric, tokens: float = 0, running: float = 0, instance: str = "gw-0", **identity: str
) -> ResourceMetrics:
    """One export of a gateway in the namespace `ns` about the queue of the model `demo`, and further metrics."""
    own = [
        gauge("pagestream.queue.tokens", time_s, tokens),
        gauge("pagestream.queue.running", time_s, running),
        gauge("pagestream.queue.drain_rate", time_s, 100),
    ]
    return resource([*own, *metrics], **{"namespace": "ns", "instance": instance} | identity)


def export(*resources: ResourceMetrics) -> ExportMetricsServiceRequest:
    return ExportMetricsServiceRequest(resource_metrics=resources)
