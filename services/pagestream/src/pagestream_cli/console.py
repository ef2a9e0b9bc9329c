"""What a person at a terminal sees. Answers and results go to stdout, everything about them to stderr."""

from __future__ import annotations

import sys


def is_watched() -> bool:
    """Whether a person looks on: progress is shown only then."""
    return sys.stderr.isatty()


def say(text: str) -> None:
    """A line about what happens."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """A piece of an answer, as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def clear_line() -> None:
    """Take back an unfinished line of progress."""
    sys.stderr.write("\r\x1b[K")
    sys.stderr.flush()
