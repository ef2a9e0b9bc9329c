"""One process' telemetry: its instruments, its tracer, the exporters that its settings turn on, and its identity."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

from pagestream_telemetry.catalog import Metric
from pagestream_telemetry.exposition import render, render_some
from pagestream_telemetry.instruments import Registry
from pagestream_telemetry.settings import TelemetrySettings
from pagestream_telemetry.tracing import Tracer

RESOURCE_VARIABLE = "OTEL_RESOURCE_ATTRIBUTES"
_DISTRIBUTION = "pagestream-telemetry"
_IMPORTED_AT = time.monotonic()
_START_FIELD = 19  # of /proc/<pid>/stat, after the name in parentheses: start in clock ticks since boot


@dataclass(frozen=True)
class Telemetry:
    """Instruments and tracer of a process, with the attributes that identify it."""

    registry: Registry
    tracer: Tracer | None
    """None: no spans are exported."""
    resource: Mapping[str, str]

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, as they are now."""
        return render(self.registry, self.resource)

    def render_some(self, metrics: Collection[Metric]) -> bytes:
        """Return these metrics alone, without what names the process."""
        return render_some(self.registry, metrics)


def silent_telemetry(service: str = "pagestream") -> Telemetry:
    """Return telemetry that exports nothing; its instruments count all the same."""
    return Telemetry(Registry(), None, {"service.name": service})


@contextmanager
def running_telemetry(
    settings: TelemetrySettings, *, service: str, instance_id: str, environ: Mapping[str, str]
) -> Iterator[Telemetry]:
    """Export what the settings say for the length of a block; the last values are sent at its end.

    Args:
        settings: without an endpoint nothing is exported, and no exporter is imported.
        service: `service.name`.
        instance_id: `service.instance.id`, the same after a restart of the process.
    """
    registry, resource = Registry(), resource_attributes(service, instance_id, environ)
    with ExitStack() as stack:
        tracer: Tracer | None = None
        if settings.exports:
            from pagestream_telemetry.otlp import OtlpMetrics, OtlpTracing

            if settings.traces:
                tracing = OtlpTracing(settings, resource)
                stack.callback(tracing.close)
                tracer = tracing
            stack.callback(OtlpMetrics(settings, registry, resource).close)
        yield Telemetry(registry, tracer, resource)


def resource_attributes(service: str, instance_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes that every metric and span of the process carries.

    They are those of OTEL_RESOURCE_ATTRIBUTES (a pod's name and uid, its pool), overridden by `service.name`,
    `service.instance.id` and `service.version`, by which the operator recognises a process. A malformed part of the
    variable is left out, as OpenTelemetry's specification says.
    """
    given: dict[str, str] = {}
    for part in environ.get(RESOURCE_VARIABLE, "").split(","):
        name, equals, value = part.partition("=")
        if equals and name.strip():
            given[name.strip()] = unquote(value.strip())
    return given | {
        "service.name": service,
        "service.instance.id": instance_id,
        "service.version": metadata.version(_DISTRIBUTION),
    }


def process_age_s() -> float:
    """Return the seconds since the process was started; without /proc, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED_AT
