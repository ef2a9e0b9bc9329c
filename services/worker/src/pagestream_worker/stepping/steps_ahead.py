"""How far an engine may be ahead of its worker: in step reports, whether it is on a thread or in a process."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pagestream_worker.stepping.reports import Report, StepDone

STEPS_AHEAD = 8
"""Step reports that a worker may have before it without having taken them. Then the engine waits."""
ACKNOWLEDGED_STEPS = STEPS_AHEAD // 2
"""Step reports of one acknowledgement: the engine is woken once for several steps."""


@dataclass(frozen=True)
class StepsTaken:
    """The worker has taken the reports of `count` further steps. Between an `EngineProcess` and its process."""

    count: int


class StepsAhead:
    """The engine's side: waits where STEPS_AHEAD steps are not acknowledged."""

    def __init__(self) -> None:
        self._left = threading.Semaphore(STEPS_AHEAD - 1)
        self._is_lifted = False

    def wait(self, report: Report) -> None:
        """Count a report that was sent; after the last step that the engine may be ahead, wait for the worker."""
        if isinstance(report, StepDone) and not self._is_lifted:
            self._left.acquire()

    def note_taken(self, num_steps: int) -> None:
        """Note that the worker has taken the reports of further steps. Any thread may call this."""
        self._left.release(num_steps)

    def lift(self) -> None:
        """Wait no more: the worker takes no further report. Any thread may call this."""
        self._is_lifted = True
        self._left.release()


class Acknowledgements:
    """The worker's side: acknowledges every ACKNOWLEDGED_STEPS steps whose reports were taken.

    Args:
        acknowledge: gets their number.
    """

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        self._acknowledge = acknowledge
        self._num_taken = 0

    def note(self, report: Report) -> None:
        """Count a report that was taken."""
        if isinstance(report, StepDone):
            self._num_taken += 1
            if self._num_taken == ACKNOWLEDGED_STEPS:
                self._num_taken = 0
                self._acknowledge(ACKNOWLEDGED_STEPS)
