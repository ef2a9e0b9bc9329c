"""Clocks: this process' own, which doesn't jump, and those of the processes that export metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_APART_S = 60.0
"""The largest difference of two clocks that is corrected."""
_TOLERANCE_S = 5.0
"""A delay up to this is that of an export, which the law allows for."""
_SLACK_S = 2.0
"""Seconds by which a correction may be wrong: each change of it costs what is known of a sender."""
_SETTLE_S = 5.0
"""Seconds for which a sender is heard before its clock is judged: what comes at once may be a backlog."""
_PERIOD_S = 30.0
"""Seconds of arrivals, at least, over which the least delay is taken: a clock that was set is followed after two."""
_SENDERS = 8192
"""Processes whose clocks are remembered; the one that was silent for longest is forgotten first."""


class SteadyClock:
    """Unix seconds that go on when the system's clock is set, unless by more than `MOST_APART_S`."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._ahead_s = wall() - steady()

    def __call__(self) -> float:
        """The time now."""
        ahead_s = self._wall() - self._steady()
        if abs(ahead_s - self._ahead_s) > MOST_APART_S:
            self._ahead_s = ahead_s
        return self._steady() + self._ahead_s


@dataclass(slots=True)
class _Sender:
    since_s: float
    """When its points began to arrive."""
    period_s: float
    """When the current period began."""
    heard_s: float
    least_s: float
    """The least delay of the current period, and of the former one."""
    former_s: float
    correction_s: float = 0.0


@dataclass
class SenderClocks:
    """How far the clocks of senders are from this process' own.

    Either clock may be wrong. What arrives is not from the future, and the least delay over a while is that of the way:
    beyond `_TOLERANCE_S`, in either direction, it is taken for the difference of the clocks. A backlog counts as old,
    since points without a delay came before it, or follow it within `_SETTLE_S`.
    """

    clock: Callable[[], float]
    _senders: dict[str, _Sender] = field(default_factory=dict)

    def correction(self, sender: str, time_s: float) -> float:
        """Return what to add to the times of a sender, of which a point with this time arrives now."""
        now = self.clock()
        delay = now - time_s
        if abs(delay) > MOST_APART_S:
            known = self._senders.get(sender)
            return 0.0 if known is None else known.correction_s
        state = self._senders.pop(sender, None) or _Sender(now, now, now, delay, delay)
        # The last one of the dictionary was heard last.
        self._senders[sender] = state
        while len(self._senders) > _SENDERS:
            del self._senders[next(iter(self._senders))]
        if not 0 <= now - state.heard_s < _PERIOD_S:
            state.since_s = now
        if not 0 <= now - state.period_s < _PERIOD_S:
            state.period_s, state.former_s, state.least_s = now, state.least_s, delay
        state.heard_s, state.least_s = now, min(state.least_s, delay)
        least = min(state.least_s, state.former_s)
        wanted = 0.0 if abs(least) <= _TOLERANCE_S else least
        if now - state.since_s >= _SETTLE_S and abs(wanted - state.correction_s) > _SLACK_S:
            state.correction_s = wanted
        return state.correction_s
