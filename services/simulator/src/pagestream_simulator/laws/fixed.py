"""Fleets that look at nothing: of a fixed size, and by a plan."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_scaling import PoolObservation


@dataclass(frozen=True, slots=True)
class FixedLaw:
    """The same number all the time."""

    engines: int
    period_s: float = 60.0

    def initial(self, usual: int) -> int:
        """All of them."""
        return self.engines

    def desired(self, observation: PoolObservation) -> int:
        """All of them."""
        return self.engines

    def planned(self, now_s: float) -> int:
        """All of them."""
        return self.engines


@dataclass(frozen=True, slots=True)
class PlannedLaw:
    """What was planned beforehand: `counts[i]` pods from `times_s[i]` on."""

    times_s: Sequence[float]
    counts: Sequence[int]
    period_s: float = 1.0

    def initial(self, usual: int) -> int:
        """The first of the plan."""
        return self.counts[0]

    def desired(self, observation: PoolObservation) -> int:
        """Of the plan, now."""
        return self.planned(observation.time_s)

    def planned(self, now_s: float) -> int:
        """Of the plan, at a time."""
        return self.counts[max(0, bisect.bisect_right(self.times_s, now_s) - 1)]
