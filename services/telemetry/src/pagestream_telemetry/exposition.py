"""Prometheus' text exposition format, with the names that OpenTelemetry's translation gives to metrics.

A collector's Prometheus exporter gives the same names:
https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Exposed
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from pagestream_telemetry.catalog import Kind, Metric
from pagestream_telemetry.instruments import Family, Point, Registry

_UNITS = {"s": "seconds", "By": "bytes"}
_INVALID_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]+")


def exposed_name(metric: Metric) -> str:
    """Return a metric's name in Prometheus, without a counter's `_total` and a histogram's `_bucket`, `_sum`, `_count`.

    The unit is a suffix: seconds, bytes; `1` of a gauge becomes `ratio`; words in braces have no suffix; `{token}/s`
    becomes `per_second`.
    """
    name = _INVALID_CHARACTERS.sub("_", metric.name)
    counted, per, per_unit = metric.unit.partition("/")
    unit = "" if counted.startswith("{") else _UNITS.get(counted, "")
    if metric.unit == "1" and metric.kind is Kind.GAUGE:
        unit = "ratio"
    if unit and not name.endswith(f"_{unit}"):
        name += f"_{unit}"
    return name + ("_per_second" if per and per_unit == "s" else "")


def render(registry: Registry, resource: Mapping[str, str]) -> bytes:
    """Return the exposition, version 0.0.4; the resource attributes are the labels of `target_info`."""
    info = InfoMetricFamily(
        "target", "The process that exported these metrics.", {_label(name): value for name, value in resource.items()}
    )
    return _exposition([info, *map(_exposed, registry.collect())])


def render_some(registry: Registry, metrics: Collection[Metric]) -> bytes:
    """Return the exposition of these metrics alone, which does not name the process."""
    return _exposition([_exposed(family) for family in registry.collect() if family.metric in metrics])


def _exposition(families: Sequence[Exposed]) -> bytes:
    exposed = CollectorRegistry(auto_describe=False)
    exposed.register(_Snapshot(families))
    return generate_latest(exposed)


class _Snapshot(Collector):
    def __init__(self, families: Sequence[Exposed]) -> None:
        self._families = families

    def describe(self) -> list[Exposed]:
        """Return nothing: names are not known before there are series."""
        return []

    def collect(self) -> Iterator[Exposed]:
        """Yield all families."""
        yield from self._families


def _exposed(family: Family) -> Exposed:
    metric = family.metric
    name, labels = exposed_name(metric), [_label(name) for name in metric.attributes]
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.text, labels=labels)
        for point in family.points:
            histogram.add_metric(_values(metric, point), _buckets(metric, point), point.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    numbers = kind(name, metric.text, labels=labels)
    for point in family.points:
        numbers.add_metric(_values(metric, point), point.value)
    return numbers


def _values(metric: Metric, point: Point) -> list[str]:
    return [point.attributes.get(name, "") for name in metric.attributes]


def _buckets(metric: Metric, point: Point) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in metric.bounds), "+Inf"]
    return list(zip(bounds, accumulate(point.counts), strict=True))


def _label(name: str) -> str:
    return _INVALID_CHARACTERS.sub("_", name)
