"""A real OpenTelemetry Collector that writes what it receives to files, and readers of these files."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import yaml
from support.processes.part import Part
from support.processes.stack import free_port
from support.processes.waiting import LIMIT_S, wait_until
from support.redis.servers import skip_for_want_of

PROGRAMS = ("otelcol", "otelcol-contrib")
COMPONENTS = {
    *("otlp", "batch", "filter", "k8s_attributes", "memory_limiter", "resource", "file", "otlp_grpc", "otlp_http"),
    *("prometheus", "health_check"),
}
"""What the chart's configuration and those of tests name; the smallest distribution lacks some, an old one has other
names."""


@dataclass(frozen=True)
class Span:
    """One span, with the service that exported it."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_s: float
    end_s: float
    error: bool
    attributes: dict[str, Any]
    events: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One point of a metric."""

    service: str
    instance: str
    name: str
    unit: str
    attributes: dict[str, Any]
    start_ns: int
    time_ns: int
    value: float
    """A number, or a histogram's count."""
    total: float
    bounds: tuple[float, ...]
    resource: dict[str, Any]


class Collector:
    """A running collector. It has a Prometheus exporter as well."""

    def __init__(self, folder: Path) -> None:
        self._traces = folder / "traces.jsonl"
        self._metrics = folder / "metrics.jsonl"
        self.grpc_port, self.prometheus_port, health_port = free_port(), free_port(), free_port()
        self._health_url = f"http://127.0.0.1:{health_port}/"
        config = folder / "collector.yaml"
        config.write_text(yaml.safe_dump(self._config(health_port)))
        self.part = Part("collector", [collector_binary(), "--config", str(config)], folder / "collector.log")

    @property
    def endpoint(self) -> str:
        """The value of PAGESTREAM_TELEMETRY__OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self.grpc_port}"

    def _config(self, health_port: int) -> dict[str, Any]:
        def file(path: Path) -> dict[str, Any]:
            return {"path": str(path), "flush_interval": "100ms"}

        return {
            "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": f"127.0.0.1:{self.grpc_port}"}}}},
            "exporters": {
                "file/traces": file(self._traces),
                "file/metrics": file(self._metrics),
                "prometheus": {"endpoint": f"127.0.0.1:{self.prometheus_port}"},
            },
            "extensions": {"health_check": {"endpoint": f"127.0.0.1:{health_port}"}},
            "service": {
                "extensions": ["health_check"],
                "telemetry": {"metrics": {"level": "none"}},
                "pipelines": {
                    "traces": {"receivers": ["otlp"], "exporters": ["file/traces"]},
                    "metrics": {"receivers": ["otlp"], "exporters": ["file/metrics", "prometheus"]},
                },
            },
        }

    def is_ready(self) -> bool:
        """Whether it is ready."""
        try:
            return httpx.get(self._health_url, timeout=2.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def spans(self) -> list[Span]:
        """All spans so far."""
        return [
            _span(_attributes(resource["resource"]), span)
            for line in _lines(self._traces)
            for resource in line["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def samples(self, name: str = "") -> list[Sample]:
        """All points so far, of one metric or of all, the oldest first."""
        return [
            _sample(_attributes(resource["resource"]), metric, point)
            for line in _lines(self._metrics)
            for resource in line["resourceMetrics"]
            for scope in resource["scopeMetrics"]
            for metric in scope["metrics"]
            if name in ("", metric["name"])
            for kind in ("gauge", "sum", "histogram")
            for point in metric.get(kind, {}).get("dataPoints", ())
        ]

    def exposition(self) -> str:
        """The page of its Prometheus exporter."""
        return httpx.get(f"http://127.0.0.1:{self.prometheus_port}/metrics", timeout=LIMIT_S).text


@cache
def _lacks(path: str) -> frozenset[str]:
    """Return the components that a collector was built without."""
    answer = subprocess.run([path, "components"], capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout
    return frozenset(COMPONENTS - {line.partition("name:")[2].strip() for line in answer.splitlines()})


def _on_path() -> list[str]:
    return [path for path in map(shutil.which, PROGRAMS) if path is not None]


def find_collector() -> str | None:
    """Return the path of a collector with all `COMPONENTS`; None without one."""
    return next((path for path in _on_path() if not _lacks(path)), None)


def collector_binary() -> str:
    """Return the path of a collector with all `COMPONENTS`. Skips the test without one."""
    chosen = find_collector()
    if chosen is not None:
        return chosen
    why = "; ".join(f"{path} is built without {', '.join(sorted(_lacks(path)))}" for path in _on_path())
    skip_for_want_of("otelcol", why or "otelcol, the OpenTelemetry Collector, is not on the PATH")
    raise AssertionError


@contextmanager
def running_collector(folder: Path) -> Iterator[Collector]:
    """Run a collector for the length of a block. Skips the test without the program."""
    folder.mkdir(parents=True, exist_ok=True)
    collector = Collector(folder)
    collector.part.start()
    try:
        wait_until(collector.is_ready, what=f"the collector\n{collector.part.log_tail()}")
        yield collector
    finally:
        collector.part.stop()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the complete lines of a file that is being written."""
    text = path.read_text() if path.exists() else ""
    for line in text.split("\n")[:-1]:
        yield json.loads(line)


def _attributes(owner: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for attribute in owner.get("attributes", ()):
        [(kind, value)] = attribute["value"].items()
        found[attribute["key"]] = int(value) if kind == "intValue" else value
    return found


def _span(resource: dict[str, Any], span: dict[str, Any]) -> Span:
    return Span(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        name=span["name"],
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        kind=span["kind"],
        start_s=int(span["startTimeUnixNano"]) / 1e9,
        end_s=int(span["endTimeUnixNano"]) / 1e9,
        error=span.get("status", {}).get("code") == 2,
        attributes=_attributes(span),
        events=tuple(event["name"] for event in span.get("events", ())),
    )


def _sample(resource: dict[str, Any], metric: dict[str, Any], point: dict[str, Any]) -> Sample:
    value = point.get("asDouble", point.get("asInt", point.get("count", 0)))
    return Sample(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        name=metric["name"],
        unit=metric.get("unit", ""),
        attributes=_attributes(point),
        start_ns=int(point.get("startTimeUnixNano", 0)),
        time_ns=int(point["timeUnixNano"]),
        value=float(value),
        total=point.get("sum", 0.0),
        bounds=tuple(point.get("explicitBounds", ())),
        resource=resource,
    )
