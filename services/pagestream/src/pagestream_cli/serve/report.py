"""Messages of serve in the terminal."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

from pagestream_cli.console import is_watched, say
from pagestream_cli.serve.engines import EngineFacts
from pagestream_cli.serve.repeats import RepeatedLines
from pagestream_cli.serve.shortform import WARNING, shorten
from pagestream_cli.servefile import ServeRecord
from pagestream_cli.supervisor.part import PartSpec, PartView
from pagestream_cli.supervisor.restart import Death

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
