"""Settings of the group TELEMETRY: where metrics and spans are exported, and what is logged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagestream_telemetry.environment import fields_of, out_of_range, read_environment

GROUP = "TELEMETRY"
LOG_FORMATS = ("json", "text")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
STANDARD_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
STANDARD_SWITCH = "OTEL_SDK_DISABLED"


@dataclass(frozen=True)
class TelemetrySettings:
    """Checked on creation: a VariableError names the variable of a value out of range."""

    otlp_endpoint: str = ""
    """OTLP/gRPC address for metrics and spans, such as http://collector:4317 (https:// is TLS); "" exports nothing."""
    export_interval_s: float = 2.0
    """Seconds between two exports of the metrics; an autoscaler's values are at most so old, plus the transport."""
    traces: bool = True
    """Whether spans are exported, where there is an endpoint."""
    trace_sample_ratio: float = 1.0
    """Share of the traces that begin in this process which are sampled; a caller's own decision is kept."""
    log_format: str = "json"
    """json (one object a line) or text."""
    log_level: str = "INFO"
    """Lowest level that is logged: DEBUG, INFO, WARNING or ERROR."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise out_of_range(GROUP, "otlp_endpoint", self.otlp_endpoint, "an address such as http://collector:4317")
        if not 0.1 <= self.export_interval_s <= 3600:
            raise out_of_range(GROUP, "export_interval_s", self.export_interval_s, "0.1 to 3600 seconds")
        if not 0 <= self.trace_sample_ratio <= 1:
            raise out_of_range(GROUP, "trace_sample_ratio", self.trace_sample_ratio, "a number from 0 to 1")
        if self.log_format not in LOG_FORMATS:
            raise out_of_range(GROUP, "log_format", self.log_format, " or ".join(LOG_FORMATS))
        if self.log_level not in LOG_LEVELS:
            raise out_of_range(GROUP, "log_level", self.log_level, ", ".join(LOG_LEVELS))

    @property
    def exports(self) -> bool:
        """Whether metrics and spans are exported."""
        return bool(self.otlp_endpoint)


def telemetry_settings(environ: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> TelemetrySettings:
    """Read the settings: flags that are not None, then the environment, then the defaults.

    OpenTelemetry's own OTEL_EXPORTER_OTLP_ENDPOINT is used where PAGESTREAM_TELEMETRY__OTLP_ENDPOINT is not set, and
    OTEL_SDK_DISABLED=true turns exporting off.

    Raises:
        VariableError: a field is unknown, or a value malformed or out of range.
    """
    given = read_environment(environ, {GROUP: fields_of(TelemetrySettings)})[GROUP]
    given |= {name: value for name, value in (flags or {}).items() if value is not None}
    given.setdefault("otlp_endpoint", environ.get(STANDARD_ENDPOINT, ""))
    settings = TelemetrySettings(**given)
    if environ.get(STANDARD_SWITCH, "").lower() == "true":
        return dataclasses.replace(settings, otlp_endpoint="")
    return settings
