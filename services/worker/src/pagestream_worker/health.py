"""What probes hear of a worker: whether it makes progress, and whether it takes requests."""

import time
from collections.abc import Callable


class Health:
    """Written by the worker, read by the endpoint's threads.

    Args:
        stall_timeout_s: after so long without progress the watchdog ends the process, and a probe says why.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._step_age_s: Callable[[], float] | None = None
        self._beat = time.monotonic()
        self._unready = "the model is being loaded"

    def watch(self, step_age_s: Callable[[], float]) -> None:
        """The model is loaded, and the watchdog runs: from now on steps must end, and `beat` must be called."""
        self._step_age_s = step_age_s
        self.beat()
        self._unready = ""

    def beat(self) -> None:
        """The watchdog has looked: the event loop works."""
        self._beat = time.monotonic()

    def end(self) -> None:
        """No more requests are taken: what runs is handed back."""
        self._unready = "the process is ending"

    @property
    def is_draining(self) -> bool:
        """Whether `end` was called."""
        return self._unready == "the process is ending"

    def problem(self) -> str:
        """Why the process should be restarted; "" while it loads, works or ends in order."""
        if self._step_age_s is None:
            return ""
        step, silence = self._step_age_s(), time.monotonic() - self._beat
        if step > self._stall_timeout_s:
            return f"a step has taken {step:.0f} s without an end"
        if silence > self._stall_timeout_s:
            return f"the event loop has not moved for {silence:.0f} s"
        return ""

    def unreadiness(self) -> str:
        """Why no requests are taken; "" where they are."""
        return self._unready or self.problem()
