"""Whether an engine process works: what probes read (`Health`), and the watchdog, which ends one that has stalled."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


EXIT_STALLED = 70  # EX_SOFTWARE: the engine made no progress
BEATS = 10
"""Heartbeats of the event loop in a stall timeout. A pause of two is one in which the process did not run."""
NAMING_LIMIT_S = 2.0
"""For the marks of the requests in a step that has stalled, before the process exits."""
_DRAINING = "the process is ending"


class Health:
    """Written by the worker, read by the probe endpoint's threads.

    Args:
        stall_timeout_s: seconds without progress after which the liveness probe fails.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self.stall_timeout_s = stall_timeout_s
        self._stalled_s = 0.0
        self._step_age_s: Callable[[], float] | None = None
        self._beat_at = time.monotonic()
        self._unready = "the model is being loaded"

    def serve(self, step_age_s: Callable[[], float]) -> None:
        """Become ready. From now on steps must end, and `beat` must be called, within the stall timeout.

        Args:
            step_age_s: returns the seconds that the current step has run.
        """
        self._step_age_s = step_age_s
        self._beat_at = time.monotonic()
        self._unready = ""

    def stand_by(self) -> None:
        """Note that the model is loaded, and that the engine waits to be asked to join."""
        self._unready = "it stands by, and has not been asked to join"

    @property
    def stalled_s(self) -> float:
        """Seconds at the last `beat` since when the engine has reported nothing though it has work.

        Only those in which the event loop ran: while the whole process is stopped (SIGSTOP, a frozen container) no
        report is read, and its engine may work. A pause between two beats counts as two periods at most.
        """
        return self._stalled_s

    def beat(self) -> None:
        """Note that the event loop works. To be called BEATS times in a stall timeout."""
        if self._step_age_s is None:
            return
        now = time.monotonic()
        elapsed_s, self._beat_at = now - self._beat_at, now
        age_s, ran_s = self._step_age_s(), min(elapsed_s, 2 * self.stall_timeout_s / BEATS)
        before_s = self._stalled_s if age_s >= elapsed_s else 0.0  # no report since the last beat
        self._stalled_s = min(age_s, before_s + ran_s)

    def change(self) -> None:
        """Become unready until `serve` or `rest`: the process loads another model."""
        self._step_age_s = None
        self._stalled_s = 0.0
        self._unready = "another model is being loaded"

    def rest(self) -> None:
        """Become ready without a model, or with one that sleeps: requests may wake it."""
        self.change()
        self._unready = ""

    def drain(self) -> None:
        """Become unready for good: no more requests are taken."""
        self._unready = _DRAINING

    @property
    def is_draining(self) -> bool:
        """Whether `drain` was called."""
        return self._unready == _DRAINING

    def problem(self) -> str:
        """Return why the process should be restarted; "" while it loads, works or drains."""
        if self._step_age_s is None:
            return ""
        if self._stalled_s > self.stall_timeout_s:
            return f"a step has run for {self._stalled_s:.0f} s"
        silence = time.monotonic() - self._beat_at
        if silence > self.stall_timeout_s:
            return f"the event loop has not moved for {silence:.0f} s"
        return ""

    def unreadiness(self) -> str:
        """Return why no requests are taken; "" when ready."""
        return self._unready or self.problem()


async def watchdog(health: Health, on_stall: Callable[[], Awaitable[None]]) -> None:
    """Exit the process with EXIT_STALLED when a step has run longer than the stall timeout: its lease lapses, and other
    engines go on with its requests.

    `on_stall`: says before, in NAMING_LIMIT_S, which requests may be the cause.
    """
    while True:
        await asyncio.sleep(health.stall_timeout_s / BEATS)
        health.beat()
        if health.stalled_s > health.stall_timeout_s:
            logger.critical(
                "a step has run for %.0f s: exiting, so that other engines go on with its requests", health.stalled_s
            )
            try:
                async with asyncio.timeout(NAMING_LIMIT_S):
                    await on_stall()
            except Exception as error:  # noqa: BLE001 - the process ends in any case
                logger.warning("the requests of the step that stalled could not be marked: %r", error)
            os._exit(EXIT_STALLED)
