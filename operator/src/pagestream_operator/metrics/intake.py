"""Stores the points of an OTLP export, and counts those that are dropped or refused."""

from __future__ import annotations

from collections import Counter as Tally

from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics

from pagestream_operator.metrics.names import ENGINE_COUNTERS, ENGINE_GAUGES, QUEUE_GAUGES, TIME_TO_FIRST_TOKEN
from pagestream_operator.metrics.points import Source, histogram_of, is_delta, is_stale, number_of, source_of
from pagestream_operator.metrics.series import Taken
from pagestream_operator.metrics.store import MetricsStore

_READ = frozenset(ENGINE_GAUGES) | ENGINE_COUNTERS | frozenset(QUEUE_GAUGES) | {TIME_TO_FIRST_TOKEN}
_KINDS = dict.fromkeys(ENGINE_COUNTERS, ("sum",)) | {TIME_TO_FIRST_TOKEN: ("histogram",)}
_GAUGE_KINDS = ("gauge", "sum")
"""An UpDownCounter arrives as a cumulative sum that isn't monotonic: its value is the level."""
_REFUSED = {
    Taken.FUTURE: "from the future",
    Taken.ABSURD: "not what the metric is",
    Taken.OVERFLOW: "over the bound of what is kept",
}


class Intake:
    """Stores one export, and counts the refused points."""

    def __init__(self, store: MetricsStore) -> None:
        """Prepare for one export."""
        self._store = store
        self._refused: Tally[str] = Tally()

    @property
    def rejected(self) -> int:
        """Number of refused data points. Points of unknown metrics and repeated ones aren't refused."""
        return self._refused.total()

    def why(self) -> str:
        """The reasons of the refusals, for the answer."""
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self._refused.items()))

    def take(self, resource: ResourceMetrics) -> None:
        """Store the metrics of one process."""
        source: Source | None = None
        outcomes = self._store.outcomes
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                if metric.name not in _READ:
                    outcomes["unknown"] += 1
                    continue
                source = source or source_of(resource.resource)
                if source is None:
                    self._refuse("anonymous", "from a resource without k8s.pod.name or service.instance.id", metric)
                else:
                    self._take_metric(source, metric)

    def _refuse(self, outcome: str, reason: str, metric: Metric) -> None:
        kind = metric.WhichOneof("data")
        points = len(getattr(metric, kind).data_points) if kind is not None else 0
        self._store.outcomes[outcome] += points
        self._refused[reason] += points

    def _take_metric(self, source: Source, metric: Metric) -> None:
        kind = metric.WhichOneof("data")
        if kind is None:
            return
        if kind not in _KINDS.get(metric.name, _GAUGE_KINDS):
            self._refuse("absurd", f"of {metric.name} as {kind}", metric)
        elif kind == "histogram":
            self._take_histogram(source, metric)
        elif kind == "sum":
            self._take_sum(source, metric)
        else:
            for point in metric.gauge.data_points:
                number = number_of(point)
                if number is not None:
                    self._count(self._store.take_number(source, metric.name, number, delta=None))

    def _take_sum(self, source: Source, metric: Metric) -> None:
        delta = is_delta(metric.sum.aggregation_temporality)
        is_level = metric.name not in ENGINE_COUNTERS
        if delta is None or (is_level and delta) or (not is_level and not metric.sum.is_monotonic):
            self._refuse("absurd", f"of {metric.name} with a temporality that it can't have", metric)
            return
        for point in metric.sum.data_points:
            number = number_of(point)
            if number is not None:
                self._count(self._store.take_number(source, metric.name, number, delta=None if is_level else delta))

    def _take_histogram(self, source: Source, metric: Metric) -> None:
        delta = is_delta(metric.histogram.aggregation_temporality)
        if delta is None:
            self._refuse("absurd", f"of {metric.name} without a temporality", metric)
            return
        for point in metric.histogram.data_points:
            if is_stale(point):
                continue
            histogram = histogram_of(point)
            if histogram is None:
                self._count(Taken.ABSURD)
            else:
                self._count(self._store.take_latency(source, histogram, delta=delta))

    def _count(self, taken: Taken) -> None:
        self._store.outcomes[taken.value] += 1
        reason = _REFUSED.get(taken)
        if reason is not None:
            self._refused[reason] += 1
