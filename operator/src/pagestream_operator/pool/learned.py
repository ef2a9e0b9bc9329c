"""What the scaling law has learnt of a pool, between its memory and the pool's status."""

from __future__ import annotations

from pagestream_scaling import Learned, ScalingMemory

from pagestream_operator.api import LearnedStatus
from pagestream_operator.fields import seconds
from pagestream_operator.pool.status import api_time

_DIGITS = 3
"""Decimal places, as of the numbers of a decision."""


def learned_status(memory: ScalingMemory, card: str) -> LearnedStatus:
    """Return what is to be kept of a memory about engines with this card."""
    known = Learned.of(memory)
    return LearnedStatus(
        card=card,
        capacity=None if known.capacity is None else round(known.capacity, _DIGITS),
        believed=None if known.capacity is None else round(known.believed, _DIGITS),
        capacity_time=None if known.capacity_s is None else api_time(known.capacity_s),
        rise=None if known.rise is None else round(known.rise, _DIGITS),
        rise_time=None if known.rise_s is None else api_time(known.rise_s),
    )


def learned_of(status: LearnedStatus | None, card: str) -> Learned:
    """Return what a status says about engines with this card; nothing where it is about others."""
    if status is None or status.card != card:
        return Learned()
    return Learned(
        status.capacity,
        _seconds(status.capacity_time),
        1.0 if status.believed is None else status.believed,
        status.rise,
        _seconds(status.rise_time),
    )


def _seconds(time: str | None) -> float | None:
    """A time of a status, which may be written by others; None where it is none, as year 1, the zero time of Go."""
    found = seconds(time)
    return found if found is not None and found > 0 else None
