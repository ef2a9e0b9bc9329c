"""The highest or lowest of the last so many seconds, in as few entries as can matter.

A window is a tuple of (time in s, value), oldest first. An entry that a later one makes irrelevant is dropped at once:
for the highest, every earlier entry that isn't higher. What is left is strictly falling (or rising), so a window of
replica counts never has more entries than there are counts.
"""

from __future__ import annotations

Window = tuple[tuple[float, int], ...]


def _recent(window: Window, now_s: float, span_s: float) -> Window:
    return tuple(entry for entry in window if now_s - entry[0] <= span_s)


def with_highest(window: Window, now_s: float, value: int, span_s: float) -> Window:
    """The window after `value` at `now_s`; its first entry is the highest of the last `span_s` seconds."""
    return (*(entry for entry in _recent(window, now_s, span_s) if entry[1] > value), (now_s, value))


def with_lowest(window: Window, now_s: float, value: int, span_s: float) -> Window:
    """The window after `value` at `now_s`; its first entry is the lowest of the last `span_s` seconds."""
    return (*(entry for entry in _recent(window, now_s, span_s) if entry[1] < value), (now_s, value))
