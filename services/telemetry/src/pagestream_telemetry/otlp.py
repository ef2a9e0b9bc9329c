"""Export by OTLP/gRPC, imported where a process has an endpoint alone: metrics as snapshots of a registry, in the SDK's
data types, and spans by its tracer.

Both go on by a new connection after a failed export: one to a collector whose node has vanished never closes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
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
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagestream_telemetry import tracing
from pagestream_telemetry.catalog import Kind
from pagestream_telemetry.instruments import Family, Point, Registry
from pagestream_telemetry.settings import TelemetrySettings
from pagestream_telemetry.tracing import NO_ATTRIBUTES, Attributes, TraceContext

logger = logging.getLogger(__name__)

_SCOPE = InstrumentationScope("pagestream")
_LAST_METRICS_S = 1.0  # wait of an ending process for its last export
CONNECTION_OF_ITS_OWN: Any = (("grpc.use_local_subchannel_pool", 1),)
"""Without it a new channel shares the connection of the one that it replaces."""
_EXPORT_LIMIT_S = 5.0  # of one export; of metrics never more than an interval: newer values matter more


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
        self._thread.join(_LAST_METRICS_S)
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


_DELAY_MS = 500  # between exports: a process that is killed loses the spans of so long
_MAX_QUEUE = 8192  # spans that wait; more are dropped, so that tracing never blocks
_MAX_BATCH = 512
_LAST_SPANS_S = 1.5  # as for metrics
_KINDS = {
    tracing.SpanKind.SERVER: trace.SpanKind.SERVER,
    tracing.SpanKind.CONSUMER: trace.SpanKind.CONSUMER,
    tracing.SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}


class OtlpTracing:
    """A tracer that exports its spans; `close` it at the end."""

    def __init__(self, settings: TelemetrySettings, resource: Mapping[str, str]) -> None:
        """Create the exporter; it connects at the first export."""
        sampler = ParentBased(TraceIdRatioBased(settings.trace_sample_ratio))
        self._provider = TracerProvider(sampler=sampler, resource=Resource(resource), shutdown_on_exit=False)
        exporter = ReconnectingSpanExporter(settings.otlp_endpoint)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=_MAX_QUEUE,
                max_export_batch_size=_MAX_BATCH,
                schedule_delay_millis=_DELAY_MS,
                export_timeout_millis=_EXPORT_LIMIT_S * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("pagestream")

    def start(
        self,
        name: str,
        parent: TraceContext,
        *,
        kind: tracing.SpanKind = tracing.SpanKind.INTERNAL,
        attributes: Attributes = NO_ATTRIBUTES,
        at_s: float | None = None,
    ) -> tracing.Span:
        """Start a span; see `tracing.Tracer`."""
        context = _sdk_context(parent)
        begun = self._tracer.start_span(name, context, _KINDS[kind], dict(attributes), start_time=_nanoseconds(at_s))
        return OtlpSpan(begun)

    def close(self) -> None:
        """Export the remaining spans, for a limited time."""
        # The SDK's own limit is half a minute for each batch, longer than a process may take to end.
        ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_LAST_SPANS_S)


class ReconnectingSpanExporter(SpanExporter):
    """Exports spans, and after a failed export over a new connection: that of a vanished collector never closes."""

    def __init__(self, endpoint: str) -> None:
        """Connect at the first export."""
        self._endpoint = endpoint
        self._exporter = self._new_exporter()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._exporter.shutdown()
            self._exporter = self._new_exporter()
        return result

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def _new_exporter(self) -> OTLPSpanExporter:
        return OTLPSpanExporter(endpoint=self._endpoint, timeout=_EXPORT_LIMIT_S, channel_options=CONNECTION_OF_ITS_OWN)


class OtlpSpan:
    """A span of the SDK."""

    __slots__ = ("_context", "_span")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        own = span.get_span_context()
        traceparent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
        self._context = TraceContext(traceparent, own.trace_state.to_header())

    @property
    def context(self) -> TraceContext:
        """Trace and span id of this span."""
        return self._context

    def set(self, attributes: Attributes) -> None:
        """Set attributes."""
        self._span.set_attributes(dict(attributes))

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Add an event."""
        self._span.add_event(name, dict(attributes))

    def fail(self, error_type: str, message: str = "") -> None:
        """Set status and `error.type`."""
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, message or error_type))

    def end(self, at_s: float | None = None) -> None:
        """End the span; later calls do nothing."""
        if self._span.is_recording():
            self._span.end(_nanoseconds(at_s))


@lru_cache(maxsize=1024)
def _sdk_context(parent: TraceContext) -> Context:
    """Convert a parent to the SDK's context; cached, since all phases of a request have the same parent."""
    return TraceContextTextMapPropagator().extract(parent._asdict()) if parent else Context()


def _nanoseconds(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s * 1e9)
