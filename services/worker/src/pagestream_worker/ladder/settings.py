"""Settings of the ladder: the group DEGRADATION."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from pagestream_telemetry.environment import fields_of, out_of_range, read_environment

from pagestream_worker.ladder.ladder import Pace, Resource, Watermarks

GROUP = "DEGRADATION"


@dataclass(frozen=True)
class DegradationSettings:
    """Watermarks as shares in use, and the pace between rungs."""

    device_high: float = 1.0
    """Share of the KV blocks that sequences hold or, preempted, need again. Memory is short above this, not at it:
    only above 1 does the pool not hold what was admitted; a pool that is full of running sequences is well used."""
    device_low: float = 0.9
    """Share of the KV blocks below which the shortage is over; a lowered batch comes to less."""
    host_high: float = 0.95
    """Share of the machine's or container's memory in use, without the cache of files. The kernel begins to kill
    near 1."""
    host_low: float = 0.9
    """Share of that memory below which the shortage is over."""
    redis_high: float = 0.9
    """Share of maxmemory in use at the fullest server. At 1 it refuses new requests of every class, and tokens wait."""
    redis_low: float = 0.8
    """Share of maxmemory below which the shortage is over."""
    climb_s: float = 5.0
    """Seconds of shortage for each rung up: requests that end in that time may end it."""
    descend_s: float = 10.0
    """Seconds below all low watermarks for each rung down; between the marks four times as many."""
    period_s: float = 1.0
    """Seconds between two readings."""

    @property
    def marks(self) -> Mapping[Resource, Watermarks]:
        """The watermarks by resource."""
        return {
            Resource.DEVICE: Watermarks(self.device_high, self.device_low),
            Resource.HOST: Watermarks(self.host_high, self.host_low),
            Resource.REDIS: Watermarks(self.redis_high, self.redis_low),
        }

    @property
    def pace(self) -> Pace:
        """An update counts for two periods at most."""
        return Pace(self.climb_s, self.descend_s, 2 * self.period_s)


def degradation_settings(environ: Mapping[str, str]) -> DegradationSettings:
    """Read the group's variables.

    Raises:
        VariableError: one is unknown, malformed or out of range.
    """
    settings = DegradationSettings(**read_environment(environ, {GROUP: fields_of(DegradationSettings)})[GROUP])
    for field in fields(settings):
        value = getattr(settings, field.name)
        if not 0 < value < math.inf:
            raise out_of_range(GROUP, field.name, value, "a number above 0")
    for resource, marks in settings.marks.items():
        if marks.low >= marks.high:
            name = f"{resource.value}_low"
            raise out_of_range(GROUP, name, marks.low, f"a number below {resource.value}_high, {marks.high}")
    for name in ("climb_s", "descend_s"):
        if getattr(settings, name) < settings.pace.longest_gap_s:
            expected = f"at least twice period_s, {settings.period_s}"
            raise out_of_range(GROUP, name, getattr(settings, name), expected)
    return settings
