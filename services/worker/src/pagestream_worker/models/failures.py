"""Models that a process could not load: those that it tries again, and those that only an operator has it try again."""

import time
from collections.abc import Callable

FIRST_DELAY_S = 5.0
MOST_DELAY_S = 600.0


class Failures:
    """By model, why and when it failed.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._permanent: dict[str, tuple[str, int]] = {}
        self._postponed: dict[str, tuple[float, float]] = {}  # the last delay, and its end, in seconds

    @property
    def permanent(self) -> dict[str, str]:
        """Models whose files or options are at fault, with the reasons."""
        return {name: reason for name, (reason, _) in self._permanent.items()}

    @property
    def postponed(self) -> tuple[str, ...]:
        """Models that are not to be tried yet."""
        now = self._clock()
        return tuple(sorted(name for name, (_, until) in self._postponed.items() if now < until))

    def note(self, name: str, reason: str, now_ms: int, *, is_permanent: bool) -> None:
        """Note a failure at a time of Redis' clock. What may pass is postponed, twice as long each time."""
        if is_permanent:
            self._permanent[name] = reason, now_ms
            return
        before_s, _ = self._postponed.get(name, (FIRST_DELAY_S / 2, 0.0))
        delay_s = min(2 * before_s, MOST_DELAY_S)
        self._postponed[name] = delay_s, self._clock() + delay_s

    def forget(self, name: str) -> None:
        """Forget the failures of a model that was loaded."""
        self._permanent.pop(name, None)
        self._postponed.pop(name, None)

    def forget_before(self, name: str, at_ms: int) -> bool:
        """Forget permanent failures from before a time of Redis' clock; return whether there was one."""
        if name not in self._permanent or self._permanent[name][1] >= at_ms:
            return False
        self.forget(name)
        return True
