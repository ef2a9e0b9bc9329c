"""What probes read of a worker: whether it makes progress, and whether it takes requests. And the watchdog."""

import asyncio
import logging
import os
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

EXIT_STALLED = 70  # EX_SOFTWARE: the engine made no progress
_DRAINING = "the process is ending"


class Health:
    """Written by the worker, read by the probe endpoint's threads.

    Args:
        stall_timeout_s: seconds without progress after which the liveness probe fails.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._step_age_s: Callable[[], float] | None = None
        self._beat_at = time.monotonic()
        self._unready = "the model is being loaded"

    def serve(self, step_age_s: Callable[[], float]) -> None:
        """Become ready. From now on steps must end, and `beat` must be called, within the stall timeout.

        Args:
            step_age_s: returns the seconds that the current step has run.
        """
        self._step_age_s = step_age_s
        self.beat()
        self._unready = ""

    def beat(self) -> None:
        """Note that the event loop works."""
        self._beat_at = time.monotonic()

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
        step, silence = self._step_age_s(), time.monotonic() - self._beat_at
        if step > self._stall_timeout_s:
            return f"a step has run for {step:.0f} s"
        if silence > self._stall_timeout_s:
            return f"the event loop has not moved for {silence:.0f} s"
        return ""

    def unreadiness(self) -> str:
        """Return why no requests are taken; "" when ready."""
        return self._unready or self.problem()


async def watchdog(health: Health, step_age_s: Callable[[], float], stall_timeout_s: float) -> None:
    """Exit the process with EXIT_STALLED when a step has run longer than `stall_timeout_s`: its lease lapses, and other
    engines go on with its requests.
    """
    while True:
        await asyncio.sleep(stall_timeout_s / 10)
        health.beat()
        age_s = step_age_s()
        if age_s > stall_timeout_s:
            logger.critical("a step has run for %.0f s: exiting, so that other engines go on with its requests", age_s)
            os._exit(EXIT_STALLED)
