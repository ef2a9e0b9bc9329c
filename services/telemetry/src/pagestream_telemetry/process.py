"""One process' telemetry: what it measures, and the ways out that its settings open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pagestream_telemetry.exposition import render
from pagestream_telemetry.instruments import Registry
from pagestream_telemetry.resource import resource_attributes
from pagestream_telemetry.settings import TelemetrySettings
from pagestream_telemetry.spans import NO_TRACER, Tracer


@dataclass(frozen=True)
class Telemetry:
    """Instruments and tracer of a process, and whose they are."""

    registry: Registry
    tracer: Tracer
    resource: Mapping[str, str]

    def render(self) -> bytes:
        """All metrics in Prometheus' text form, as they are now."""
        return render(self.registry, self.resource)


def silent_telemetry(service: str = "pagestream") -> Telemetry:
    """Telemetry that exports nothing: instruments count all the same."""
    return Telemetry(Registry(), NO_TRACER, {"service.name": service})


@contextmanager
def running_telemetry(
    settings: TelemetrySettings, *, service: str, instance_id: str, environ: Mapping[str, str]
) -> Iterator[Telemetry]:
    """Telemetry that exports what the settings say, for the length of a block; the last figures are sent at its end.

    Args:
        settings: without an endpoint nothing is exported, and no exporter is even loaded.
        service: `service.name`.
        instance_id: `service.instance.id`, the same after a restart of the process.
        environ: for OTEL_RESOURCE_ATTRIBUTES.
    """
    registry, resource = Registry(), resource_attributes(service, instance_id, environ)
    with ExitStack() as stack:
        tracer = NO_TRACER
        if settings.exports:
            from pagestream_telemetry.otlp_metrics import OtlpMetrics
            from pagestream_telemetry.otlp_tracing import OtlpTracing

            if settings.traces:
                tracing = OtlpTracing(settings, resource)
                stack.callback(tracing.close)
                tracer = tracing
            stack.callback(OtlpMetrics(settings, registry, resource).close)
        yield Telemetry(registry, tracer, resource)
