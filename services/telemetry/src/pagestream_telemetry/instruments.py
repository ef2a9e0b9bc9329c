"""Instruments that cost a tenth of a microsecond: numbers and bucket counts, read when somebody asks.

Each series has one writer thread; readers may see it between two of its fields, never a wrong type. Nothing here
imports OpenTelemetry: what leaves the process is made by `exposition` and `otlp` from the same snapshot
(docs/decisions/0080).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagestream_telemetry.catalog import Kind, Metric
from pagestream_telemetry.errors import TelemetryError

logger = logging.getLogger(__name__)


class Number:
    """One series of a counter or a gauge. A gauge that was never set is not told."""

    __slots__ = ("value",)

    def __init__(self, value: float | None) -> None:
        self.value = value

    def add(self, amount: float = 1) -> None:
        """Raises it."""
        self.value = (self.value or 0) + amount

    def set(self, value: float | None) -> None:
        """Sets it; None takes it back. A counter may be set to a count that is kept elsewhere, which only rises."""
        self.value = value


class Distribution:
    """One series of a histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def record(self, value: float, count: int = 1) -> None:
        """Adds observations of one size. A bucket holds what is at most its bound."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


SeriesT = TypeVar("SeriesT", Number, Distribution)


class Instrument(Generic[SeriesT]):
    """All series of one metric."""

    def __init__(self, metric: Metric, make: Callable[[], SeriesT]) -> None:
        """For `Registry`."""
        self.metric = metric
        self._make: Callable[[], SeriesT] = make
        self._series: dict[tuple[str, ...], SeriesT] = {}

    def series(self, *values: str) -> SeriesT:
        """The series of these attribute values, in the order of the metric's attributes; "" leaves one out.

        Raises:
            TelemetryError: more or fewer values than the metric has attributes.
        """
        found = self._series.get(values)
        if found is None:
            if len(values) != len(self.metric.attributes):
                raise TelemetryError(f"{self.metric.name}: {values} given for {self.metric.attributes}")
            found = self._series.setdefault(values, self._make())
        return found

    def forget_others(self, values: set[tuple[str, ...]]) -> None:
        """Drops every series but these: what a gauge told of is no longer there."""
        for each in [known for known in self._series if known not in values]:
            self._series.pop(each, None)

    def items(self) -> list[tuple[tuple[str, ...], SeriesT]]:
        """All series, with their attribute values."""
        return list(self._series.items())


@dataclass(frozen=True)
class Point:
    """One series at one moment: a number, or the counts of a histogram's buckets with the sum of what they counted."""

    attributes: Mapping[str, str]
    value: float = 0.0
    counts: tuple[int, ...] = ()
    total: float = 0.0


@dataclass(frozen=True)
class Family:
    """A metric with its points."""

    metric: Metric
    points: tuple[Point, ...]


class Registry:
    """The instruments of one process (or of one part of it: tests have several)."""

    def __init__(self) -> None:
        """Empty."""
        self.started_ns = time.time_ns()
        """When its counters were 0, in Unix nanoseconds."""
        self._numbers: dict[str, Instrument[Number]] = {}
        self._distributions: dict[str, Instrument[Distribution]] = {}
        self._sources: list[Callable[[], None]] = []

    def number(self, metric: Metric) -> Instrument[Number]:
        """The instrument of a counter or a gauge, made at the first call."""
        initial = 0 if metric.kind is Kind.COUNTER else None
        return self._numbers.setdefault(metric.name, Instrument(metric, lambda: Number(initial)))

    def distribution(self, metric: Metric) -> Instrument[Distribution]:
        """The instrument of a histogram, made at the first call."""
        return self._distributions.setdefault(metric.name, Instrument(metric, lambda: Distribution(metric.bounds)))

    def on_collect(self, source: Callable[[], None]) -> None:
        """Has `source` called before each collection, on the thread that collects: it sets what isn't counted here."""
        self._sources.append(source)

    def collect(self) -> list[Family]:
        """All metrics that have a series, as they are now."""
        for source in self._sources:
            try:
                source()
            except Exception:  # one source that fails must not take the others' figures away
                logger.exception("a source of metrics failed")
        families = [_family(each, _number) for each in list(self._numbers.values())]
        families += [_family(each, _distribution) for each in list(self._distributions.values())]
        return [family for family in families if family.points]


def _family(
    instrument: Instrument[SeriesT], point: Callable[[Metric, tuple[str, ...], SeriesT], Point | None]
) -> Family:
    points = (point(instrument.metric, values, series) for values, series in instrument.items())
    return Family(instrument.metric, tuple(each for each in points if each is not None))


def _attributes(metric: Metric, values: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in zip(metric.attributes, values, strict=True) if value}


def _number(metric: Metric, values: tuple[str, ...], series: Number) -> Point | None:
    return None if series.value is None else Point(_attributes(metric, values), series.value)


def _distribution(metric: Metric, values: tuple[str, ...], series: Distribution) -> Point:
    return Point(_attributes(metric, values), counts=tuple(series.counts), total=series.total)
