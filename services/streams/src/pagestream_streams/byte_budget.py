"""A bound in bytes that many holders share."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """Counts bytes that are held against one limit. Used by the tasks of one event loop.

    Holders either try to take more and free what they have where that fails, or wait while they hold nothing: so no two
    of them wait for each other.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Create it with nothing held."""
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_waited_for(self) -> bool:
        """Whether anybody waits for bytes that others hold."""
        return bool(self._waiting)

    def try_take(self, num_bytes: int) -> bool:
        """Take bytes if they are free and nobody waits for them; return whether they were taken."""
        if self._waiting or self.held_bytes + num_bytes > self.limit_bytes:
            return False
        self.held_bytes += num_bytes
        return True

    async def take(self, num_bytes: int) -> None:
        """Wait until the bytes are free, in order of arrival, and take them. ValueError for more than the limit.

        The caller must hold nothing of this budget.
        """
        if num_bytes > self.limit_bytes:
            raise ValueError(f"{num_bytes} bytes can never be free: the limit is {self.limit_bytes}")
        if self.try_take(num_bytes):
            return
        turn = num_bytes, asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._admit()
            elif not turn[1].cancelled():  # admitted just before
                self.give(num_bytes)
            raise

    def give(self, num_bytes: int) -> None:
        """Give back bytes that were taken."""
        self.held_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.held_bytes + self._waiting[0][0] <= self.limit_bytes:
            num_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self.held_bytes += num_bytes
                turn.set_result(None)
