"""Instruments of a tenth of a microsecond: numbers and bucket counts, read at collection.

Each series has one writer thread; a reader may see a state between two of its fields, never a wrong type. Nothing here
imports OpenTelemetry: `exposition` and `otlp` export the same snapshot (docs/design/telemetry.md).
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
    """One series of a counter or a gauge. A gauge that was never set is not exported."""

    __slots__ = ("value",)

    def __init__(self, value: float | None) -> None:
        self.value = value

    def add(self, amount: float = 1) -> None:
        """Add to the value."""
        self.value = (self.value or 0) + amount

    def set(self, value: float | None) -> None:
        """Set the value; None stops its export. A counter may be set to a rising total kept elsewhere."""
        self.value = value


class Distribution:
    """One series of a histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def record(self, value: float, count: int = 1) -> None:
        """Add `count` observations of one value. A bucket holds the values up to its bound."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


SeriesT = TypeVar("SeriesT", Number, Distribution)


class Instrument(Generic[SeriesT]):
    """All series of one metric."""

    def __init__(self, metric: Metric, make: Callable[[], SeriesT]) -> None:
        """Created by `Registry`."""
        self.metric = metric
        self._make: Callable[[], SeriesT] = make
        self._series: dict[tuple[str, ...], SeriesT] = {}

    def series(self, *values: str) -> SeriesT:
        """Return the series of these attribute values, in the order of the metric's attributes; "" leaves one out.

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
        """Remove every other series: what they measured no longer exists."""
        for each in [known for known in self._series if known not in values]:
            self._series.pop(each, None)

    def items(self) -> list[tuple[tuple[str, ...], SeriesT]]:
        """Return all series with their attribute values."""
        return list(self._series.items())


@dataclass(frozen=True)
class Point:
    """One series at one moment: a number, or the counts of a histogram's buckets and the sum of the observations."""

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
    """The instruments of one process; tests have several."""

    def __init__(self) -> None:
        """Create without instruments."""
        self.started_ns = time.time_ns()
        """When the counters were 0, in Unix nanoseconds."""
        self._numbers: dict[str, Instrument[Number]] = {}
        self._distributions: dict[str, Instrument[Distribution]] = {}
        self._sources: list[Callable[[], None]] = []

    def number(self, metric: Metric) -> Instrument[Number]:
        """Return the instrument of a counter or a gauge."""
        initial = 0 if metric.kind is Kind.COUNTER else None
        return self._numbers.setdefault(metric.name, Instrument(metric, lambda: Number(initial)))

    def distribution(self, metric: Metric) -> Instrument[Distribution]:
        """Return the instrument of a histogram."""
        return self._distributions.setdefault(metric.name, Instrument(metric, lambda: Distribution(metric.bounds)))

    def on_collect(self, source: Callable[[], None]) -> None:
        """Call `source` before each collection, on the collecting thread, to set values that are kept elsewhere."""
        self._sources.append(source)

    def off_collect(self, source: Callable[[], None]) -> None:
        """Call a source no more."""
        self._sources = [each for each in self._sources if each != source]

    def collect(self) -> list[Family]:
        """Return all metrics that have a series, as they are now."""
        for source in self._sources:
            try:
                source()
            except Exception:  # the other sources' values are still collected
                logger.exception("a source of metrics failed; its values are stale")
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
