"""When requests are sent."""

from __future__ import annotations

import random


def poisson(count: int, rate: float, rng: random.Random) -> list[float]:
    """Seconds of `count` arrivals of a Poisson process of `rate` a second; the first is at 0."""
    now = 0.0
    arrivals = [now]
    while len(arrivals) < count:
        now += rng.expovariate(rate)
        arrivals.append(now)
    return arrivals[:count]
