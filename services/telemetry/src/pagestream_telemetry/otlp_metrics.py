"""Export of metrics by OTLP/gRPC: snapshots of a registry as the SDK's data types, sent by its exporter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

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
_CLOSE_LIMIT_S = 1.0  # wait of an ending process for its last export
CONNECTION_OF_ITS_OWN: Any = (("grpc.use_local_subchannel_pool", 1),)
"""Without it a new channel shares the connection of the one that it replaces."""
_EXPORT_LIMIT_S = 5.0  # of one export; never more than an interval: newer values matter more


class OtlpMetrics:
    """Exports a registry's metrics every settings.export_interval_s, from its own thread; `close` it at the end."""

    def __init__(self, settings: TelemetrySettings, registry: Registry, resource: Mapping[str, str]) -> None:
        """Start at once; a collector that can't be reached is logged, not raised."""
        self._interval_s = settings.export_interval_s
        self._registry = registry
        self._resource = Resource(resource)
        self._limit_s = min(_EXPORT_LIMIT_S, settings.export_interval_s)
        self._endpoint = settings.otlp_endpoint
        self._exporter = self._new_exporter()
        self._ending = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="metrics export", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Export the last values, for a limited time."""
        self._ending.set()
        self._thread.join(_CLOSE_LIMIT_S)
        self._exporter.shutdown()

    def _new_exporter(self) -> OTLPMetricExporter:
        return OTLPMetricExporter(endpoint=self._endpoint, timeout=self._limit_s, channel_options=CONNECTION_OF_ITS_OWN)

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        """Export once. No error may end the thread: nothing would export this process' metrics any more."""
        try:
            data = metrics_data(self._registry.collect(), self._resource, self._registry.started_ns)
            sent = self._exporter.export(data, timeout_millis=self._limit_s * 1000) is MetricExportResult.SUCCESS
        except Exception:
            sent = False
            if not self._failures:
                logger.exception("metrics can't be exported")
        if not sent and not self._failures:
            logger.warning("metrics can't be exported; retrying at each interval")
        elif sent and self._failures:
            logger.info("metrics are exported again after %d failures", self._failures)
        self._failures = 0 if sent else self._failures + 1
        if not sent:
            self._renew_exporter()

    def _renew_exporter(self) -> None:
        """Open a new connection: a collector whose node vanished never closes the old one, and another may answer."""
        try:
            self._exporter.shutdown()
            self._exporter = self._new_exporter()
        except Exception:
            logger.exception("the exporter of metrics can't be renewed")


def metrics_data(families: Sequence[Family], resource: Resource, started_ns: int) -> MetricsData:
    """Convert families to the SDK's data, cumulative since `started_ns` (Unix nanoseconds)."""
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
    # Minimum and maximum are not kept: cumulative ones say nothing about the last interval.
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
