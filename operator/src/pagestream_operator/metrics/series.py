"""Series of points: late and repeated ones, either temporality, restarts of the process."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from pagestream_operator.metrics.points import Attributes, Combine

_SAME_EXPORT_S = 0.5
"""Seconds by which the times of one export's points may differ."""
_REMEMBERED = 64
"""Intervals of a delta series that are remembered to detect repeated ones: two minutes of exports."""
_RECENT = 256
"""Increments of a counter that are kept, whatever the export interval."""
_MARGIN_S = 1e-6
"""Rounding of nanoseconds as floats."""


class Taken(Enum):
    """The outcome of storing a point."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Or late: a newer point is stored."""
    OVERFLOW = "overflow"
    """More attribute sets than this metric may have."""
    FUTURE = "future"
    FOREIGN = "foreign"
    """About the queue of another release."""
    ABSURD = "absurd"


@dataclass(slots=True)
class Gauge:
    """The newest value for each attribute set.

    Sets over the limit are kept combined, as one value of the newest export: what they report is never read as 0.
    Points of a repeated export can't be recognized among these, so a sum over them may be too high.
    """

    combine: Combine
    limit: int
    """Most attribute sets that are kept one by one."""
    values: dict[Attributes, tuple[float, float]] = field(default_factory=dict)
    others: tuple[float, float] | None = None

    def add(self, attributes: Attributes, time_s: float, value: float) -> Taken:
        """Store the value if it is newer than the known one."""
        last = self.values.get(attributes)
        if last is not None and time_s <= last[0]:
            return Taken.DUPLICATE
        if last is None and len(self.values) >= self.limit and not self._drop_outdated(time_s):
            return self._add_to_others(time_s, value)
        self.values[attributes] = (time_s, value)
        return Taken.ACCEPTED

    def _add_to_others(self, time_s: float, value: float) -> Taken:
        known = self.others
        if known is None or time_s - known[0] > _SAME_EXPORT_S:
            self.others = (time_s, value)
        elif known[0] - time_s > _SAME_EXPORT_S:
            return Taken.DUPLICATE
        else:
            self.others = (max(time_s, known[0]), self._combined([known[1], value]))
        return Taken.ACCEPTED

    def _combined(self, values: list[float]) -> float:
        return sum(values) if self.combine is Combine.SUM else max(values)

    def _drop_outdated(self, time_s: float) -> bool:
        self.values = {key: entry for key, entry in self.values.items() if time_s - entry[0] <= _SAME_EXPORT_S}
        return len(self.values) < self.limit

    def read(self) -> tuple[float, float] | None:
        """Return (time, value) of the newest export over its attribute sets; a set that it lacks is gone."""
        if not self.values:
            return None
        entries = [*self.values.values(), *([] if self.others is None else [self.others])]
        newest = max(time_s for time_s, _ in entries)
        return newest, self._combined([value for time_s, value in entries if newest - time_s <= _SAME_EXPORT_S])

    def read_sets(self) -> tuple[float, dict[Attributes, float]]:
        """Return the time of the newest export, and its values by attribute set, without those over the limit."""
        newest = max((time_s for time_s, _ in self.values.values()), default=-math.inf)
        current = {key: value for key, (time_s, value) in self.values.items() if newest - time_s <= _SAME_EXPORT_S}
        return newest, current


@dataclass(frozen=True, slots=True)
class Increment:
    """The growth of a series between two times: one amount for a counter, one for each bucket of a histogram."""

    from_s: float
    to_s: float
    amounts: tuple[float, ...]


@dataclass(slots=True)
class Accumulator:
    """Converts the points of one series into increments, in either temporality.

    A cumulative point that is lower than the last one, or has a later start, is from a restarted process: all of it was
    added since. The first cumulative point of a series is no increment, unless its start is after `watched_s`.
    """

    watched_s: float
    """Since when this process listens."""
    start_s: float = 0.0
    time_s: float | None = None
    amounts: tuple[float, ...] = ()
    seen: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def add_delta(self, start_s: float, time_s: float, amounts: Sequence[float]) -> Increment | None:
        """Return the increment of a delta point; None if it is repeated. A late one counts."""
        if (start_s, time_s) in self.seen:
            return None
        oldest_known = self.seen[0][1] if len(self.seen) == _REMEMBERED else None
        if oldest_known is not None and time_s <= oldest_known:
            return None  # too old to be distinguished from a repetition
        self.seen.append((start_s, time_s))
        from_s = start_s or (self.time_s if self.time_s is not None and self.time_s < time_s else time_s)
        self.time_s = time_s if self.time_s is None else max(self.time_s, time_s)
        return Increment(from_s, time_s, tuple(amounts))

    def add_cumulative(self, start_s: float, time_s: float, amounts: Sequence[float]) -> Increment | None:
        """Return the increment since the last point; None if the point isn't newer, or is the first."""
        if self.time_s is not None and (time_s <= self.time_s or start_s < self.start_s - _MARGIN_S):
            return None
        last_s, last_start, last = self.time_s, self.start_s, self.amounts
        self.start_s, self.time_s, self.amounts = start_s, time_s, tuple(amounts)
        if last_s is None:
            began_here = self.watched_s <= start_s < time_s
            return Increment(start_s, time_s, tuple(amounts)) if began_here else None
        fell = len(last) != len(amounts) or any(new < old for new, old in zip(amounts, last, strict=False))
        if fell or start_s > last_start + _MARGIN_S:
            return Increment(max(last_s, min(start_s, time_s)), time_s, tuple(amounts))
        return Increment(last_s, time_s, tuple(new - old for new, old in zip(amounts, last, strict=True)))


@dataclass(slots=True)
class Counter:
    """A monotonic sum over its attribute sets, as a rate."""

    limit: int
    """Most attribute sets."""
    window_s: float
    watched_s: float
    sets: dict[Attributes, Accumulator] = field(default_factory=dict)
    recent: deque[Increment] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, attributes: Attributes, start_s: float, time_s: float, value: float, *, delta: bool) -> Taken:
        """Store a point."""
        accumulator = self.sets.get(attributes)
        if accumulator is None:
            if len(self.sets) >= self.limit:
                return Taken.OVERFLOW
            accumulator = self.sets[attributes] = Accumulator(self.watched_s)
        first = accumulator.time_s is None
        add = accumulator.add_delta if delta else accumulator.add_cumulative
        increment = add(start_s, time_s, (value,))
        if increment is None:
            return Taken.ACCEPTED if first else Taken.DUPLICATE
        self.recent.append(increment)
        while self.recent and self.recent[0].to_s < time_s - 2 * self.window_s:
            self.recent.popleft()
        return Taken.ACCEPTED

    def rate(self) -> float | None:
        """Return the growth per second over the newest window; None before an increment is known."""
        if not self.recent:
            return None
        newest = max(increment.to_s for increment in self.recent)
        current = [increment for increment in self.recent if newest - increment.to_s < self.window_s]
        span_s = newest - min(increment.from_s for increment in current)
        return sum(increment.amounts[0] for increment in current) / span_s if span_s > 0 else None
