"""How old a process' view of what Redis holds is."""

from __future__ import annotations

import time
from typing import NamedTuple


class Reading(NamedTuple):
    """A view that is being read."""

    began_at: float
    num_changes: int


class ViewAge:
    """Of a view that tasks read and change.

    What a task reads while another one changes it may be as it was before: such a view counts as never read.
    """

    def __init__(self) -> None:
        """Create it for a view that was never read."""
        self._read_at = float("-inf")
        self._num_changes = 0

    @property
    def seconds(self) -> float:
        """Since its reading began; infinite where that has to be done before the view is used."""
        return time.monotonic() - self._read_at

    def begin(self) -> Reading:
        """Note that the view is being read."""
        return Reading(time.monotonic(), self._num_changes)

    def end(self, reading: Reading) -> None:
        """Note that it has been read."""
        is_whole = reading.num_changes == self._num_changes
        self._read_at = reading.began_at if is_whole else float("-inf")

    def note_change(self) -> None:
        """Note that this process has changed what Redis holds."""
        self._num_changes += 1
        self._read_at = float("-inf")
