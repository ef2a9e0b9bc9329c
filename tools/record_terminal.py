"""Runs a command in a terminal of its own, and writes what it showed as an animated SVG.

    .venv/bin/python tools/record_terminal.py --out docs/page/demo.svg -- .venv/bin/pagestream demo

What is recorded is what the command printed, at the times at which it did, but for pauses, which are shortened. The
last picture stays for some seconds before the animation starts again.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyte
from terminal_svg import Frame, Run, draw

PERIOD_S = 0.5
"""Between two pictures."""
LONGEST_PAUSE_S = 1.0
"""Without a change; a longer one is shortened to it."""
LAST_S = 8.0
"""For which the last picture stays."""
_READ_BYTES = 1 << 16


class CommandError(RuntimeError):
    """The command has ended with an exit code other than 0, or not in time."""


def record(command: Sequence[str], columns: int, rows: int, limit_s: float) -> list[Frame]:
    """Run a command in a terminal; return what it showed. Raises CommandError.

    Args:
        limit_s: seconds after which the command is killed.
    """
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
    )
    os.close(terminal)
    frames: list[Frame] = []
    try:
        for _ in _read(end, stream, limit_s):
            lines = tuple(_line(screen, row) for row in range(rows))
            if lines != (frames[-1].lines if frames else ((),) * rows):
                frames.append(Frame(time.monotonic(), lines))
        code = process.wait(LONGEST_PAUSE_S)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{command[0]} has closed its terminal and goes on") from error
    finally:
        os.close(end)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        raise CommandError(f"{command[0]} ended with exit code {code}")
    return _timed(frames)


def _read(end: int, stream: pyte.ByteStream, limit_s: float) -> Iterator[None]:
    """Feed the terminal until the command ends; yield about every PERIOD_S, and in the end. Raises CommandError."""
    began, due = time.monotonic(), 0.0
    while time.monotonic() - began < limit_s:
        readable, _, _ = select.select([end], [], [], PERIOD_S)
        if readable:
            try:
                data = os.read(end, _READ_BYTES)
            except OSError:  # how Linux says that the other end is closed
                data = b""
            if not data:
                yield
                return
            stream.feed(data)
        if time.monotonic() >= due:
            due = time.monotonic() + PERIOD_S
            yield
    raise CommandError(f"the command has not ended within {limit_s:g} s")


def _line(screen: pyte.Screen, row: int) -> tuple[Run, ...]:
    """Return a row of the terminal as runs of equal colour, without the blanks at its end."""
    runs: list[Run] = []
    for column in range(screen.columns):
        cell = screen.buffer[row][column]
        if runs and (runs[-1].colour, runs[-1].is_bold) == (cell.fg, cell.bold):
            runs[-1] = runs[-1].longer(cell.data)
        else:
            runs.append(Run(cell.data, cell.fg, cell.bold))
    while runs and not runs[-1].text.strip():
        runs.pop()
    return tuple(runs)


def _timed(frames: Sequence[Frame]) -> list[Frame]:
    """Return frames with the seconds for which each is shown."""
    ends = [after.seconds for after in frames[1:]]
    shown = [min(end - frame.seconds, LONGEST_PAUSE_S) for frame, end in zip(frames, ends, strict=False)]
    return [Frame(seconds, frame.lines) for frame, seconds in zip(frames, [*shown, LAST_S], strict=True)]


def main() -> None:
    """Record what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="SVG to write")
    parser.add_argument("--columns", type=int, default=112, metavar="N", help="of the terminal (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=26, metavar="N", help="of the terminal (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for the command")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="what is run, after --")
    options = parser.parse_args()
    try:
        frames = record(options.command, options.columns, options.rows, options.limit)
    except CommandError as error:
        sys.exit(f"error: {error}")
    title = " ".join([Path(options.command[0]).name, *options.command[1:]])
    options.out.write_text(draw(frames, options.columns, title) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
