"""Spans by OTLP/gRPC, made and sent by OpenTelemetry's SDK."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import lru_cache

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagestream_telemetry import spans
from pagestream_telemetry.context import TraceContext
from pagestream_telemetry.settings import TelemetrySettings
from pagestream_telemetry.spans import NO_ATTRIBUTES, Attributes

_DELAY_MS = 500  # a process that is killed loses the spans of so long; a look at the queue twice a second costs nothing
_QUEUE = 8192  # spans that may wait; more are dropped: telemetry never holds work up
_BATCH = 512
_EXPORT_LIMIT_S = 5.0
_LAST_LIMIT_S = 1.5  # what a process that ends waits for its last spans
_KINDS = {
    spans.SpanKind.SERVER: trace.SpanKind.SERVER,
    spans.SpanKind.CONSUMER: trace.SpanKind.CONSUMER,
    spans.SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}


class OtlpTracing:
    """A tracer that sends its spans; `close` it at the end."""

    def __init__(self, settings: TelemetrySettings, resource: Mapping[str, str]) -> None:
        """Connects nothing yet."""
        sampler = ParentBased(TraceIdRatioBased(settings.trace_sample_ratio))
        self._provider = TracerProvider(sampler=sampler, resource=Resource(resource), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=_EXPORT_LIMIT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=_QUEUE,
                max_export_batch_size=_BATCH,
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
        kind: spans.SpanKind = spans.SpanKind.INTERNAL,
        attributes: Attributes = NO_ATTRIBUTES,
        at_s: float | None = None,
    ) -> spans.Span:
        """Begins a span; see `spans.Tracer`."""
        context = _place(parent)
        begun = self._tracer.start_span(name, context, _KINDS[kind], dict(attributes), start_time=_nanoseconds(at_s))
        return OtlpSpan(begun)

    def close(self) -> None:
        """Sends what is left, for a limited time."""
        # The SDK's own limit is half a minute for each batch, which a process that was told to end doesn't have.
        ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_LAST_LIMIT_S)


class OtlpSpan:
    """A span of the SDK."""

    __slots__ = ("_context", "_span")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        place = span.get_span_context()
        traceparent = f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.trace_flags:02x}"
        self._context = TraceContext(traceparent, place.trace_state.to_header())

    @property
    def context(self) -> TraceContext:
        """Its own place."""
        return self._context

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""
        self._span.set_attributes(dict(attributes))

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Notes what happened."""
        self._span.add_event(name, dict(attributes))

    def fail(self, error_type: str, message: str = "") -> None:
        """Sets status and `error.type`."""
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, message or error_type))

    def end(self, at_s: float | None = None) -> None:
        """Ends it, once."""
        if self._span.is_recording():
            self._span.end(_nanoseconds(at_s))


@lru_cache(maxsize=1024)
def _place(parent: TraceContext) -> Context:
    """A parent as the SDK takes it; a request's phases have the same one."""
    return TraceContextTextMapPropagator().extract(parent._asdict()) if parent else Context()


def _nanoseconds(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s * 1e9)
