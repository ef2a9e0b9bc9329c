"""Lines that parts write again and again: shown once, then counted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

QUIET_S = 5.0
"""Seconds between two lines about one repeated message."""
_MOST_KEPT = 256
_VARYING = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+")
"""What differs between lines that say the same: ids, times, counts."""


@dataclass
class _Repeated:
    part: str
    text: str
    shown_s: float
    num_hidden: int = 0


class RepeatedLines:
    """Show a line of a part; of further ones like it, their number.

    Args:
        show: gets each line that is to be shown.
        clock: seconds.
    """

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._clock = clock
        self._kept: dict[tuple[str, str], _Repeated] = {}

    def add(self, part: str, text: str) -> None:
        """Take a line."""
        key = (part, _VARYING.sub("#", text))
        known = self._kept.get(key)
        if known is None:
            if len(self._kept) >= _MOST_KEPT:
                self._tell(self._kept.pop(next(iter(self._kept))))
            self._kept[key] = _Repeated(part, text, self._clock())
            self._show(f"{part:>10} | {text}")
            return
        known.num_hidden += 1
        known.text = text
        self.tell()

    def tell(self, *, is_end: bool = False) -> None:
        """Show the numbers of lines that have been hidden for QUIET_S; at the end all."""
        for each in self._kept.values():
            if is_end or self._clock() - each.shown_s >= QUIET_S:
                self._tell(each)

    def _tell(self, each: _Repeated) -> None:
        if each.num_hidden:
            times = "once more" if each.num_hidden == 1 else f"{each.num_hidden} more times"
            self._show(f"{each.part:>10} | {each.text} ({times})")
            each.shown_s, each.num_hidden = self._clock(), 0
