"""OpenTelemetry for Pagestream's processes.

Names are imported when they are used: most of a process needs no exporter.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_telemetry.addresses import (
        ALL_ADDRESSES,
        bare_host,
        is_loopback,
        join_address,
        listening_sockets,
        loopback_host,
        split_address,
        unmapped,
    )
    from pagestream_telemetry.catalog import ENGINE_METRICS, GATEWAY_METRICS, Kind, Metric
    from pagestream_telemetry.endpoint import Endpoint, Probes
    from pagestream_telemetry.environment import GROUPS, read_environment
    from pagestream_telemetry.errors import EndpointError, TelemetryError, VariableError
    from pagestream_telemetry.exposition import exposed_name
    from pagestream_telemetry.instruments import Family, Point, Registry
    from pagestream_telemetry.logs import configure_logs, json_formatter
    from pagestream_telemetry.process import Telemetry, resource_attributes, running_telemetry, silent_telemetry
    from pagestream_telemetry.settings import TelemetrySettings, telemetry_settings
    from pagestream_telemetry.tracing import (
        NO_TRACE,
        TraceContext,
        caller_context,
        current_trace,
        set_trace,
        within_trace,
    )

__all__ = [
    "ALL_ADDRESSES",
    "ENGINE_METRICS",
    "GATEWAY_METRICS",
    "GROUPS",
    "NO_TRACE",
    "Endpoint",
    "EndpointError",
    "Family",
    "Kind",
    "Metric",
    "Point",
    "Probes",
    "Registry",
    "Telemetry",
    "TelemetryError",
    "TelemetrySettings",
    "TraceContext",
    "VariableError",
    "bare_host",
    "caller_context",
    "configure_logs",
    "current_trace",
    "exposed_name",
    "is_loopback",
    "join_address",
    "json_formatter",
    "listening_sockets",
    "loopback_host",
    "read_environment",
    "resource_attributes",
    "running_telemetry",
    "set_trace",
    "silent_telemetry",
    "split_address",
    "telemetry_settings",
    "unmapped",
    "within_trace",
]

_MODULES = {
    **dict.fromkeys(
        (
            "ALL_ADDRESSES",
            "bare_host",
            "is_loopback",
            "join_address",
            "listening_sockets",
            "loopback_host",
            "split_address",
            "unmapped",
        ),
        "addresses",
    ),
    **dict.fromkeys(("ENGINE_METRICS", "GATEWAY_METRICS", "Kind", "Metric"), "catalog"),
    **dict.fromkeys(
        ("NO_TRACE", "TraceContext", "caller_context", "current_trace", "set_trace", "within_trace"), "tracing"
    ),
    **dict.fromkeys(("Endpoint", "Probes"), "endpoint"),
    **dict.fromkeys(("GROUPS", "read_environment"), "environment"),
    **dict.fromkeys(("EndpointError", "TelemetryError", "VariableError"), "errors"),
    "exposed_name": "exposition",
    **dict.fromkeys(("Family", "Point", "Registry"), "instruments"),
    **dict.fromkeys(("configure_logs", "json_formatter"), "logs"),
    **dict.fromkeys(("Telemetry", "resource_attributes", "running_telemetry", "silent_telemetry"), "process"),
    **dict.fromkeys(("TelemetrySettings", "telemetry_settings"), "settings"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
