"""Which partitions may have work, from messages on the model's channel.

Messages are lost at times, so every partition counts as having work again after a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

from pagestream_streams.tasks import wait_for_event


class Doorbell:
    """Remembers which partitions a claim found empty, until they ring again."""

    def __init__(self, delay_s: float) -> None:
        """`delay_s`: seconds until another engine's partition rings, and until an empty one is tried again."""
        self._delay = delay_s
        self._empty_since: defaultdict[int, float] = defaultdict(lambda: float("-inf"))
        self._rang_at: defaultdict[int, float] = defaultdict(lambda: float("-inf"))
        self._rung = asyncio.Event()
        self._timers: set[asyncio.TimerHandle] = set()

    def ring(self, partition: int, *, at_once: bool) -> None:
        """Note that a partition has got work: at once where it is this engine's own, else after the delay."""
        if at_once:
            self._ring_now(partition)
            return
        loop = asyncio.get_running_loop()
        handle = loop.call_later(self._delay, self._ring_now, partition)
        self._timers = {timer for timer in self._timers if timer.when() > loop.time()} | {handle}

    def ring_all(self) -> None:
        """Note that messages may have been missed: every partition may have work."""
        self._empty_since.clear()
        self._rung.set()

    def note_empty(self, partition: int, asked_at: float) -> None:
        """Note that a claim found nothing in a partition.

        `asked_at`: when that claim began, on time.monotonic(). A ring since then may be about an entry that it missed.
        """
        if self._rang_at[partition] < asked_at:
            self._empty_since[partition] = asked_at

    def look_again(self) -> None:
        """End `wait`: a claim found something, so there may be more."""
        self._rung.set()

    def partitions_with_work(self, count: int) -> list[int]:
        """Return which of the partitions 0 to count - 1 may have work, and let `wait` wait for the next ring."""
        self._rung.clear()
        limit = time.monotonic() - self._delay
        return [number for number in range(count) if self._empty_since[number] < limit]

    async def wait(self, timeout_s: float) -> None:
        """Wait for a ring since the last `partitions_with_work`, at most `timeout_s` seconds."""
        await wait_for_event(self._rung, timeout_s)

    def close(self) -> None:
        """Cancel delayed rings."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _ring_now(self, partition: int) -> None:
        self._rang_at[partition] = time.monotonic()
        self._empty_since.pop(partition, None)
        self._rung.set()
