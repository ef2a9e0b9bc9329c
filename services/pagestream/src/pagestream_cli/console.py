"""Output of commands: answers and results go to stdout, messages and progress to stderr."""

from __future__ import annotations

import sys


def is_watched() -> bool:
    """Whether stderr is a terminal: progress is shown only there."""
    return sys.stderr.isatty()


def say(text: str) -> None:
    """Print a message line."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print a piece of an answer as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def clear_line() -> None:
    """Erase an unfinished line of progress."""
    sys.stderr.write("\r\x1b[K")
    sys.stderr.flush()
