"""Which of several equal parts work, and which stand by for them."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Peer(Protocol):
    """A part that works or is a spare."""

    is_spare: bool
    """Whether it stands by, or will once it is started."""

    @property
    def is_alive(self) -> bool:
        """Whether it has a process."""

    @property
    def is_ready(self) -> bool:
        """Whether it works."""

    @property
    def is_waiting(self) -> bool:
        """Whether it has died and waits for its restart."""

    def promote(self) -> None:
        """Have its process, which was started as a spare, take up work as soon as it can."""


class Spares:
    """Assign roles within a group of equal parts: always the same number work, the others are spares.

    A role is no property of a part: one that dies gives it to a spare, and comes back as a spare itself.

    Args:
        num_working: parts that work.
    """

    def __init__(self, num_working: int) -> None:
        self._num_working = num_working
        self._peers: list[Peer] = []
        self._changed = asyncio.Event()

    def add(self, peer: Peer) -> None:
        """Add a part, before any is started. The first `num_working` begin with work."""
        peer.is_spare = len(self._peers) >= self._num_working
        self._peers.append(peer)

    async def wait_turn(self, peer: Peer) -> None:
        """Wait before the start of a spare until those that work are ready, since they need the processor. Where one of
        them waits for its restart, this part works in its place.
        """
        while peer.is_spare:
            working = [each for each in self._peers if not each.is_spare]
            for other in working:
                if other.is_waiting:
                    other.is_spare, peer.is_spare = True, False
                    return
            if all(other.is_ready for other in working):
                return
            self._changed.clear()
            await self._changed.wait()

    def note_change(self) -> None:
        """Note that a part became ready or died."""
        self._changed.set()

    def replace(self, dead: Peer) -> None:
        """Promote a spare in place of a part that has died; where none has a process, the part keeps its role."""
        if dead.is_spare:
            return
        spare = next((each for each in self._peers if each.is_spare and each.is_alive), None)
        if spare is not None:
            dead.is_spare, spare.is_spare = True, False
            spare.promote()
