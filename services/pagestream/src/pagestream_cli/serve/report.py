"""Messages of serve in the terminal."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

from pagestream_cli.console import is_watched, say
from pagestream_cli.serve.shortform import WARNING, shorten
from pagestream_cli.servefile import ServeRecord
from pagestream_cli.supervisor.part import PartSpec, PartView
from pagestream_cli.supervisor.restart import Death

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


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

    def phase(self, name: str) -> None:
        """Print that a part is ready, and what the others are waited for."""
        self.say(f"  {self.elapsed_s:5.1f} s  {name}")

    def ready(self, record: ServeRecord) -> None:
        """Print the line that says that the deployment is ready; scripts wait for it."""
        urls, targets = " ".join(record.http_urls()), " ".join(record.grpc_targets())
        self.say(f"ready: model {record.model!r} at {urls} (gRPC {targets}) after {self.elapsed_s:.1f} s")

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
        """Print a line of a part: warnings in a terminal, everything with --verbose."""
        if self._console is None and not self._verbose:
            return
        short = shorten(text)
        if self._verbose or short.level >= WARNING:
            self.say(f"{spec.name:>10} | {short.text}")
