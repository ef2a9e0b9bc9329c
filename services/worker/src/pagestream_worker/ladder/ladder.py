"""The ladder: a state machine from shares of memory in use to the rung in force. It knows no clock and does nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum


class Resource(Enum):
    """What may be short."""

    DEVICE = "device"
    """KV blocks."""
    HOST = "host"
    """Memory of the machine, or of the container."""
    REDIS = "redis"
    """Memory of the fullest Redis server."""


class Rung(IntEnum):
    """What is given up; each rung keeps what those below it do."""

    NORMAL = 0
    NO_PREFETCH = 1
    """Claim nothing before the prompts claimed last are computed."""
    SMALL_CACHE = 2
    """Save no evicted blocks to host memory, and keep few acknowledged log entries."""
    SMALL_BATCH = 3
    """Run fewer sequences at once."""
    LEAVE_CLASS_2 = 4
    """Claim no new requests of class 2."""
    REFUSE_CLASS_2 = 5
    """Ask gateways to refuse them."""
    LEAVE_CLASS_1 = 6
    REFUSE_CLASS_1 = 7


TOP = max(Rung)
BETWEEN_MARKS = 4
"""So many times as long as below the low marks each rung down takes between the marks."""
Shares = Mapping[Resource, float | None]
"""Used / all of each resource; None: unknown now."""


@dataclass(frozen=True)
class Watermarks:
    """Shares between which it recovers slowly."""

    high: float
    """Above it the resource is short."""
    low: float
    """Below it there is enough."""


@dataclass(frozen=True)
class Pace:
    """How fast rungs follow each other."""

    climb_s: float
    """Seconds of shortage for each rung up."""
    descend_s: float
    """Seconds without shortage for each rung down."""
    longest_gap_s: float
    """Most seconds that one update counts for: of a process that was stopped meanwhile, no more is known."""


class Ladder:
    """Climbs while some resource is above its high watermark, and descends while none is.

    A level follows the time of both: one up in each `climb_s`; one down in each `descend_s` while all are below their
    low watermarks, and at a quarter of that pace while some are between, so that no rung stays for ever. The rung
    follows the level with a play of one, so that it turns back only after a whole level in the other direction: noise
    around a watermark never moves it to and fro. Both rise with the shares: with more in use at each moment, no rung is
    ever lower; nor is it with more resources watched.

    An update moves by at most one rung.

    Args:
        marks: of each resource that is watched.
        pace: with a gap below `climb_s` and `descend_s`.
    """

    def __init__(self, marks: Mapping[Resource, Watermarks], pace: Pace) -> None:
        self._marks = marks
        self._pace = pace
        self._level = 0.0
        self.rung = Rung.NORMAL

    def update(self, shares: Shares, elapsed_s: float) -> Rung:
        """Return the rung after so many seconds with these shares."""
        seconds = min(elapsed_s, self._pace.longest_gap_s)
        if self.short(shares):
            self._level = min(float(TOP), self._level + seconds / self._pace.climb_s)
        else:
            self._level = max(0.0, self._level - seconds * self._relief(shares) / self._pace.descend_s)
        self.rung = Rung(max(math.floor(self._level), min(self.rung, math.ceil(self._level))))
        return self.rung

    def short(self, shares: Shares) -> list[Resource]:
        """Return the resources above their high watermark."""
        return [each for each, marks in self._marks.items() if (shares.get(each) or 0.0) > marks.high]

    def _relief(self, shares: Shares) -> float:
        """Return the share of the pace down that counts where nothing is short: none while one is unknown."""
        relief = 1.0
        for each, marks in self._marks.items():
            share = shares.get(each)
            if share is None:
                return 0.0
            if share >= marks.low:
                relief = 1 / BETWEEN_MARKS
        return relief
