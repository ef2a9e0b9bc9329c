"""Which partitions may have work. Rings are lost at times, so every partition counts as loud again after a while."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

from pagestream_streams.tasks import wait_for_event


class Doorbell:
    """Own partitions ring at once, others' when their entries may be old enough to take."""

    def __init__(self, delay_s: float) -> None:
        """`delay_s` is both the delay of others' rings and the time after which silence means nothing."""
        self._delay = delay_s
        self._quiet_since: defaultdict[int, float] = defaultdict(lambda: float("-inf"))
        self._rang_at: defaultdict[int, float] = defaultdict(lambda: float("-inf"))
        self._rung = asyncio.Event()
        self._timers: set[asyncio.TimerHandle] = set()

    def ring(self, partition: int, *, at_once: bool) -> None:
        """A partition has got work."""
        if at_once:
            self._ring_now(partition)
            return
        handle = asyncio.get_running_loop().call_later(self._delay, self._ring_now, partition)
        self._timers = {timer for timer in self._timers if timer.when() > asyncio.get_running_loop().time()} | {handle}

    def ring_all(self) -> None:
        """Rings may have been missed."""
        self._quiet_since.clear()
        self._rung.set()

    def quiet(self, partition: int, asked_at: float) -> None:
        """A claim that began at `asked_at` on the monotonic clock has found nothing in a partition.

        A ring since then may be about what it has just missed.
        """
        if self._rang_at[partition] < asked_at:
            self._quiet_since[partition] = asked_at

    def look_again(self) -> None:
        """A claim has found something: there may be more."""
        self._rung.set()

    def loud(self, partitions: int) -> list[int]:
        """The partitions that a claim should look at."""
        self._rung.clear()
        limit = time.monotonic() - self._delay
        return [number for number in range(partitions) if self._quiet_since[number] < limit]

    async def wait(self, timeout_s: float) -> None:
        """Waits for a ring since the last look, at most so long."""
        await wait_for_event(self._rung, timeout_s)

    def close(self) -> None:
        """Forgets delayed rings."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _ring_now(self, partition: int) -> None:
        self._rang_at[partition] = time.monotonic()
        self._quiet_since.pop(partition, None)
        self._rung.set()
