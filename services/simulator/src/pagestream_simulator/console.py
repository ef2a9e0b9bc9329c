"""Progress for a person at a terminal: on stderr, so that results can be redirected."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
