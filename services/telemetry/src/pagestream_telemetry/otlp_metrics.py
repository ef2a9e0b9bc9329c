"""Metrics by OTLP/gRPC: snapshots of a registry as the data types of OpenTelemetry's SDK, sent by its exporter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from pagestream_telemetry.catalog import Kind
from pagestream_telemetry.instruments import Family, Point, Registry
from pagestream_telemetry.settings import TelemetrySettings

logger = logging.getLogger(__name__)

_SCOPE = InstrumentationScope("pagestream")
_LAST_LIMIT_S = 1.0  # what a process that ends waits for its last figures
_MOST_S = 5.0  # what one export may take; never more than an interval: later figures say more


class OtlpMetrics:
    """Sends a registry's metrics every settings.export_interval_s, from a thread of its own; `close` it at the end."""

    def __init__(self, settings: TelemetrySettings, registry: Registry, resource: Mapping[str, str]) -> None:
        """Starts at once; nothing fails where nobody listens."""
        self._interval_s = settings.export_interval_s
        self._registry = registry
        self._resource = Resource(resource)
        self._limit_s = min(_MOST_S, settings.export_interval_s)
        self._exporter = OTLPMetricExporter(endpoint=settings.otlp_endpoint, timeout=self._limit_s)
        self._ending = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="metrics export", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends the last figures, for a limited time."""
        self._ending.set()
        self._thread.join(_LAST_LIMIT_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        data = metrics_data(self._registry.collect(), self._resource, self._registry.started_ns)
        sent = self._exporter.export(data, timeout_millis=self._limit_s * 1000) is MetricExportResult.SUCCESS
        if not sent and not self._failures:
            logger.warning("metrics can't be exported; trying on")
        elif sent and self._failures:
            logger.info("metrics are exported again after %d failures", self._failures)
        self._failures = 0 if sent else self._failures + 1


def metrics_data(families: Sequence[Family], resource: Resource, started_ns: int) -> MetricsData:
    """Families as the SDK's data, cumulative since `started_ns`."""
    now_ns = time.time_ns()
    metrics = [_metric(family, started_ns, now_ns) for family in families]
    scope = ScopeMetrics(scope=_SCOPE, metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")])


def _metric(family: Family, started_ns: int, now_ns: int) -> SdkMetric:
    metric = family.metric
    data: Sum | Gauge | Histogram
    if metric.kind is Kind.HISTOGRAM:
        data = Histogram(
            [_histogram_point(point, metric.bounds, started_ns, now_ns) for point in family.points],
            AggregationTemporality.CUMULATIVE,
        )
    elif metric.kind is Kind.COUNTER:
        points = [_number_point(point, started_ns, now_ns) for point in family.points]
        data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge([_number_point(point, None, now_ns) for point in family.points])
    return SdkMetric(name=metric.name, description=metric.text, unit=metric.unit, data=data)


def _number_point(point: Point, started_ns: int | None, now_ns: int) -> NumberDataPoint:
    return NumberDataPoint(
        attributes=dict(point.attributes),
        start_time_unix_nano=started_ns or 0,
        time_unix_nano=now_ns,
        value=point.value,
    )


def _histogram_point(point: Point, bounds: Sequence[float], started_ns: int, now_ns: int) -> HistogramDataPoint:
    # Extremes are not kept: of a cumulative histogram they say nothing about the last interval.
    return HistogramDataPoint(
        attributes=dict(point.attributes),
        start_time_unix_nano=started_ns,
        time_unix_nano=now_ns,
        count=sum(point.counts),
        sum=point.total,
        bucket_counts=list(point.counts),
        explicit_bounds=list(bounds),
        min=None,  # type: ignore[arg-type]
        max=None,  # type: ignore[arg-type]
    )
