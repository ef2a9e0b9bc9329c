"""A line of progress on a terminal."""

from __future__ import annotations

import os
import sys
from time import monotonic
from typing import TextIO

_REFRESH_S = 0.1


class ProgressLine:
    """Counts finished prompts and generated tokens. Writes nothing unless enabled and the stream is a terminal."""

    def __init__(self, total: int, *, enabled: bool, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._total = total
        self._done = 0
        self._tokens = 0
        self._started = monotonic()
        self._shown_at = float("-inf")

    def note(self, *, tokens: int, finished: int) -> None:
        """Add what a step brought."""
        self._tokens += tokens
        self._done += finished
        if self._enabled and monotonic() - self._shown_at >= _REFRESH_S:
            self._show()

    def close(self) -> None:
        """Show the last state and end the line."""
        if self._enabled:
            self._show()
            self._stream.write("\n")
            self._stream.flush()

    def _show(self) -> None:
        self._shown_at = monotonic()
        rate = self._tokens / max(self._shown_at - self._started, 1e-9)
        self._stream.write(f"\r{self._done}/{self._total} prompts, {self._tokens} tokens, {rate:.0f} tokens/s\x1b[K")
        self._stream.flush()
