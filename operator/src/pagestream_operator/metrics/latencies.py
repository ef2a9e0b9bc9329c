"""Histograms of latencies from several processes, added up over a window."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from pagestream_scaling import LatencyWindow

from pagestream_operator.metrics.points import Attributes, Histogram
from pagestream_operator.metrics.series import Accumulator, Increment, Taken

_SLOT_S = 1.0


@dataclass(slots=True)
class _Slot:
    index: int
    bounds: tuple[float, ...]
    counts: list[float]


@dataclass(slots=True)
class Latencies:
    """One model's histogram over all gateways and attribute sets."""

    kept_s: float
    watched_s: float
    series_limit: int
    series: dict[tuple[str, Attributes], Accumulator] = field(default_factory=dict)
    bounds: dict[tuple[str, Attributes], tuple[float, ...]] = field(default_factory=dict)
    slots: deque[_Slot] = field(default_factory=deque)
    slots_limit: int = 1024
    first_s: float = math.inf

    def take(self, process: str, point: Histogram, *, delta: bool) -> Taken:
        """Add a point of `process`' series with the point's attributes."""
        key = (process, point.attributes)
        accumulator = self.series.get(key)
        if accumulator is None or self.bounds[key] != point.bounds:
            if accumulator is None and len(self.series) >= self.series_limit and not self._drop_silent(point.time_s):
                return Taken.OVERFLOW
            accumulator = self.series[key] = Accumulator(self.watched_s)
            self.bounds[key] = point.bounds
        first = accumulator.time_s is None
        take = accumulator.take_delta if delta else accumulator.take_cumulative
        increment = take(point.start_s, point.time_s, point.counts)
        self.first_s = min(self.first_s, point.time_s)
        if increment is None:
            return Taken.ACCEPTED if first else Taken.DUPLICATE
        self._add(point.bounds, increment)
        return Taken.ACCEPTED

    def is_alive(self, since_s: float) -> bool:
        """Whether any process has reported since `since_s`."""
        return any(each.time_s is not None and each.time_s >= since_s for each in self.series.values())

    def _drop_silent(self, now_s: float) -> bool:
        for key, accumulator in list(self.series.items()):
            if accumulator.time_s is None or now_s - accumulator.time_s > self.kept_s:
                del self.series[key], self.bounds[key]
        return len(self.series) < self.series_limit

    def _add(self, bounds: tuple[float, ...], increment: Increment) -> None:
        index = math.floor(increment.to_s / _SLOT_S)
        for slot in self.slots:
            if slot.index == index and slot.bounds == bounds:
                slot.counts = [old + new for old, new in zip(slot.counts, increment.amounts, strict=True)]
                return
        self.slots.append(_Slot(index, bounds, list(increment.amounts)))
        oldest = math.floor((increment.to_s - self.kept_s) / _SLOT_S) - 1
        while self.slots and (self.slots[0].index < oldest or len(self.slots) > self.slots_limit):
            self.slots.popleft()

    def read(self, now_s: float, window_s: float) -> LatencyWindow | None:
        """Return the last `window_s` seconds up to `now_s`, at most `kept_s`; None if no process has ever reported."""
        if math.isinf(self.first_s):
            return None
        window_s = min(window_s, self.kept_s)
        current = [slot for slot in self.slots if now_s - window_s < (slot.index + 1) * _SLOT_S]
        bounds = tuple(sorted({bound for slot in current for bound in slot.bounds}))
        counts = [0.0] * (len(bounds) + 1)
        for slot in current:
            for (_, high), count in zip(pairwise((0.0, *slot.bounds, math.inf)), slot.counts, strict=True):
                counts[bisect_left(bounds, high)] += count  # where bounds differ, count it as late as possible
        span_s = min(window_s, max(_SLOT_S, now_s - self.first_s))
        return LatencyWindow(bounds, tuple(counts), span_s)
