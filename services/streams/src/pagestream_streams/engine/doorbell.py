"""Wakes an engine for new work, from messages on the model's channel.

Messages are lost at times: claims ask partitions again that have not rung for a while (claim_order.py).
"""

from __future__ import annotations

import asyncio
import math
import time

from pagestream_streams.engine.claim_order import ClaimOrder
from pagestream_streams.tasks import wait_for_event


class Doorbell:
    """Passes rings on to the claim order, those of other engines' partitions after a delay."""

    def __init__(self, order: ClaimOrder, delay_s: float) -> None:
        """`delay_s`: seconds until another engine's partition rings."""
        self._order = order
        self._delay = delay_s
        self._rung = asyncio.Event()
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def ring(self, partition: int, *, at_once: bool) -> None:
        """Note that a partition has got work: at once where it is this engine's own, else after the delay."""
        if at_once:
            self._ring_now(partition)
        else:
            self.ring_in(partition, self._delay)

    def ring_in(self, partition: int, delay_s: float) -> None:
        """Ring for a partition after a delay, or sooner where a ring is due already. inf: not at all."""
        if math.isinf(delay_s):
            return
        loop = asyncio.get_running_loop()
        due = self._timers.get(partition)
        if due is not None and due.when() <= loop.time() + delay_s:
            return  # the reply to that ring's question names what is still left to others
        if due is not None:
            due.cancel()
        self._timers[partition] = loop.call_later(delay_s, self._ring_now, partition)

    def ring_all(self) -> None:
        """Note that messages may have been missed: every partition may have work."""
        self._order.forget()
        self._rung.set()

    def look_again(self) -> None:
        """End `wait`: a claim found something, so there may be more."""
        self._rung.set()

    def answer(self) -> None:
        """Let `wait` wait for the next ring: a claim begins."""
        self._rung.clear()

    async def wait(self, timeout_s: float) -> None:
        """Wait for a ring since the last `answer`, at most `timeout_s` seconds."""
        await wait_for_event(self._rung, timeout_s)

    def close(self) -> None:
        """Cancel delayed rings."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _ring_now(self, partition: int) -> None:
        self._timers.pop(partition, None)
        self._order.ring(partition, time.monotonic())
        self._rung.set()
