"""Stop strings in streamed text: what may be shown, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """What a piece of text came to."""

    text: str
    """What may be shown now."""
    stop_string: str | None
    """The stop string that ended it."""


class StopStringMatcher:
    """Finds the stop string that is complete first, wherever the token borders fall.

    Text that may be the beginning of a stop string is held back until that is decided, so that what was shown is never
    taken back. The result depends on the characters alone, not on how they were cut into pieces, but for one thing:
    what follows the match in the same piece is dropped.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop_string: bool = False) -> None:
        self._stops = tuple(stop_strings)
        self._include = include_stop_string
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Take the next piece of text."""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return StopMatch(text[: end if self._include else start], stop)
        keep = len(text) - self._longest_beginning(text)
        self._held = text[keep:]
        return StopMatch(text[:keep], None)

    def flush(self) -> str:
        """The text that was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning of some stop string, but not all of it."""
        for length in range(min(len(text), max(map(len, self._stops), default=1) - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
