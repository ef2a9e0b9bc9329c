"""Messages of serve in the terminal, with the output of parts in a short form.

Lines that parts write again and again are shown once, then counted.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagestream_cli.console import is_watched, say
from pagestream_cli.datadir import ServeRecord
from pagestream_cli.serve.plan import EngineFacts
from pagestream_cli.supervisor.part import Death, PartSpec, PartView

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

WAIT_S = 30.0
"""Seconds of a start after which it says what it waits for; then after twice as many, and so on."""


class Reporter:
    """Print one line for each event; in a terminal, show a spinner while the model loads.

    Errors of writing are ignored: where the terminal or the pipe is closed, serve continues, and the parts' logs have
    the details.
    """

    def __init__(self, *, started: float, verbose: bool) -> None:
        self._started = started
        self._verbose = verbose
        self._console: Console | None = None
        self._status: Status | None = None
        self._repeats = RepeatedLines(self.say)
        self._next_wait_s = WAIT_S
        if is_watched():
            from rich.console import Console

            self._console = Console(stderr=True, highlight=False)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Print a line, above the spinner."""
        with contextlib.suppress(OSError):
            if self._console is None:
                say(text)
            else:
                self._console.print(text, markup=False, soft_wrap=True)

    def loading(self, text: str) -> None:
        """Show the spinner; only in a terminal."""
        if self._console is not None:
            self._status = self._console.status(text)
            with contextlib.suppress(OSError):
                self._status.start()

    def loaded(self) -> None:
        """Remove the spinner."""
        if self._status is not None:
            with contextlib.suppress(OSError):
                self._status.stop()
            self._status = None

    def tick(self, waiting: str) -> None:
        """Take note that time passes: call it about once a second.

        `waiting`: what a start still waits for; empty once it is done.
        """
        self._repeats.tell()
        if waiting and self.elapsed_s >= self._next_wait_s:
            self.say(f"after {self.elapsed_s:.0f} s still waiting for {waiting}")
            self._next_wait_s = max(2 * self._next_wait_s, self.elapsed_s)

    def end(self) -> None:
        """Print what has been held back."""
        self._repeats.tell(is_end=True)

    def phase(self, name: str) -> None:
        """Print that a part is ready, and what the others are waited for."""
        self.say(f"  {self.elapsed_s:5.1f} s  {name}")

    def ready(self, record: ServeRecord) -> None:
        """Print the line that says that the deployment is ready; scripts wait for it."""
        urls, targets = " ".join(record.http_urls()), " ".join(record.grpc_targets())
        self.say(f"ready: model {record.model!r} at {urls} (gRPC {targets}) after {self.elapsed_s:.1f} s")

    def start_screen(self, record: ServeRecord, facts: EngineFacts, *, has_page: bool, command: str) -> None:
        """Print what is served where, and what to type next."""
        url, target = record.http_urls()[0], record.grpc_targets()[0]
        context = [f"{facts.max_model_len:,} tokens of context"] if facts.max_model_len else []
        place = [f"{facts.dtype} on {facts.device}"] if facts.device else []
        rows = {
            "model": ", ".join([record.default_model, *context, *place]),
            "page": f"{url}/" if has_page else "",
            "docs": f"{url}/docs",
            "API": f"{url}/v1 (as OpenAI's and Anthropic's), gRPC at {target}",
            "next": f"{command}   (in another terminal; Ctrl-C here ends the server)",
        }
        for name, value in rows.items():
            if value:
                self.say(f"{name:<6} {value}")

    def died(self, view: PartView, death: Death, delay_s: float) -> None:
        """Print that a part ended unexpectedly."""
        how = f"exit code {death.exit_code}" if death.is_exit else signal.Signals(-death.exit_code).name
        when = "now" if delay_s == 0 else f"in {delay_s:.1f} s"
        self.say(f"{view.spec.name} died ({how}) after {death.lived_s:.1f} s; it restarts {when}")
        self.say(f"  log: {view.spec.log_path}")

    def back(self, view: PartView) -> None:
        """Print that a part that had died is ready again."""
        self.say(f"{view.spec.name} is back")

    def line(self, spec: PartSpec, text: str) -> None:
        """Print a line of a part: warnings, those that repeat with their number; everything with --verbose."""
        short = shorten(text)
        if self._verbose:
            self.say(f"{spec.name:>10} | {short.text}")
        elif short.level >= WARNING:
            self._repeats.add(spec.name, short.text)


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


WARNING_WORDS = ("warning", "error", "critical", "fatal", "traceback")
REDIS_LINE = re.compile(r"\d+:[A-Z] \d+ \w{3} \d{4} [\d:.]+ ([.*#-]) (.*)")
"""Redis marks lines of its highest log level with #, including the one that says that it has started."""
REDIS_WORDS = ("error", "fatal", "can't", "cannot", "no space", "bug report", "too long")
LEVELS = {"debug": 10, "info": 20, "warn": 30, "warning": 30, "error": 40, "critical": 50, "fatal": 50}
WARNING = 30
MAX_CHARS = 400


@dataclass(frozen=True)
class ShortLine:
    """One line in its short form."""

    level: int
    """Level as the logging module numbers it."""
    text: str


def shorten(line: str) -> ShortLine:
    """Shorten a JSON log record, a line of Redis, or any other line, whose level is guessed from its words."""
    if record := _record(line):
        return _from_record(record, line)
    if match := REDIS_LINE.fullmatch(line):
        mark, text = match.groups()
        is_bad = mark == "#" and any(word in text.lower() for word in REDIS_WORDS)
        return ShortLine(WARNING if is_bad else LEVELS["info"], _cut(text))
    is_bad = any(word in line.lower() for word in WARNING_WORDS)
    return ShortLine(WARNING if is_bad else LEVELS["info"], _cut(line))


def _from_record(record: dict[str, object], line: str) -> ShortLine:
    level = LEVELS.get(str(record.get("level", record.get("levelname", "info"))).lower(), LEVELS["info"])
    message = next((str(record[key]) for key in ("message", "msg", "event") if key in record), line)
    error = next((str(record[key]) for key in ("exception", "exc_info", "error") if record.get(key)), "")
    last_line = error.strip().splitlines()[-1] if error.strip() else ""
    return ShortLine(level, _cut(f"{message}: {last_line}" if last_line else message))


def _record(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"
