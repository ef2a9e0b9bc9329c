"""Laws that ignore what they observe: a fleet of a fixed size, and a plan made in advance."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from pagestream_scaling import PoolObservation


@dataclass(frozen=True, slots=True)
class FixedLaw:
    """The same number of pods throughout."""

    engines: int
    period_s: float = 60.0

    def initial(self, usual: int) -> int:
        """Return the fleet's size."""
        return self.engines

    def desired(self, observation: PoolObservation) -> int:
        """Return the fleet's size."""
        return self.engines

    def planned(self, now_s: float) -> int:
        """Return the fleet's size."""
        return self.engines


@dataclass(frozen=True, slots=True)
class PlannedLaw:
    """A plan: `counts[i]` pods from `times_s[i]` (ascending, seconds) on."""

    times_s: Sequence[float]
    counts: Sequence[int]
    period_s: float = 1.0

    def initial(self, usual: int) -> int:
        """Return the plan's first count."""
        return self.counts[0]

    def desired(self, observation: PoolObservation) -> int:
        """Return the plan's count at the observation's time."""
        return self.planned(observation.time_s)

    def planned(self, now_s: float) -> int:
        """Return the plan's count at `now_s`; before its first time, the first count."""
        return self.counts[max(0, bisect.bisect_right(self.times_s, now_s) - 1)]
