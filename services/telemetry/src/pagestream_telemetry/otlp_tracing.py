"""Export of spans by OTLP/gRPC, with OpenTelemetry's SDK."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagestream_telemetry import tracing
from pagestream_telemetry.otlp_metrics import CONNECTION_OF_ITS_OWN
from pagestream_telemetry.settings import TelemetrySettings
from pagestream_telemetry.tracing import NO_ATTRIBUTES, Attributes, TraceContext

_DELAY_MS = 500  # between exports: a process that is killed loses the spans of so long
_MAX_QUEUE = 8192  # spans that wait; more are dropped, so that tracing never blocks
_MAX_BATCH = 512
_EXPORT_LIMIT_S = 5.0
_CLOSE_LIMIT_S = 1.5  # wait of an ending process for its last export
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
        ending.join(_CLOSE_LIMIT_S)


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
