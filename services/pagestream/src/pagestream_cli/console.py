"""Output of commands: answers and results go to stdout, messages and progress to stderr."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TextIO

_DUMB = ("dumb", "unknown")


def can_redraw(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes back what it shows: not one of `TERM=dumb`, such as an editor's."""
    return stream.isatty() and os.environ.get("TERM") not in _DUMB


def has_colours(stream: TextIO) -> bool:
    """Whether to colour what a stream shows: on such a terminal, unless NO_COLOR is set (no-color.org)."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


def is_watched() -> bool:
    """Whether stderr is a terminal that can show progress."""
    return can_redraw(sys.stderr)


def say(text: str) -> None:
    """Print a message line."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print a piece of an answer as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def program() -> str:
    """Return what to type for this command here: its name where the PATH finds it, else its file."""
    file = Path(sys.executable).with_name("pagestream")
    found = shutil.which("pagestream")
    if not file.is_file() or (found is not None and Path(found).absolute() == file):
        return "pagestream"
    folder = Path.cwd()
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)
