"""Whose telemetry it is: the attributes of the process, which every metric and every span carries."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from urllib.parse import unquote

VARIABLE = "OTEL_RESOURCE_ATTRIBUTES"
_DISTRIBUTION = "pagestream-telemetry"


def resource_attributes(service: str, instance_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """OpenTelemetry's own OTEL_RESOURCE_ATTRIBUTES (a pod's name and uid, its pool), with `service.name`,
    `service.instance.id` and `service.version` over it: these are what an operator finds a process by.

    A malformed part of the variable is left out, as OpenTelemetry's specification says.
    """
    given: dict[str, str] = {}
    for part in environ.get(VARIABLE, "").split(","):
        name, equals, value = part.partition("=")
        if equals and name.strip():
            given[name.strip()] = unquote(value.strip())
    return given | {
        "service.name": service,
        "service.instance.id": instance_id,
        "service.version": metadata.version(_DISTRIBUTION),
    }
