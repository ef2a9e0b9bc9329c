"""One process of a deployment, which tests kill, stop and start again; there is no supervisor."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.processes.waiting import LIMIT_S

STOP_LIMIT_S = 15.0
WITH_PARENT = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
"""Before a command: it ends when the tests' process is killed."""


class StackError(RuntimeError):
    """A part did not start, or ended unexpectedly; the message has the end of its log."""


@dataclass
class Part:
    """One process with its command and log; it can be started again after a kill."""

    name: str
    command: Sequence[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Id of the process that was started last; 0 without one."""
        return 0 if self.process is None else self.process.pid

    def start(self) -> None:
        """Start the process; its output is added to the log."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        if self.process is None:
            raise StackError(f"{self.name} is not running")
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process (SIGKILL) and wait for its end."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; returns the exit status."""
        if self.process is None:
            raise StackError(f"{self.name} is not running")
        return self.process.wait(limit_s)

    def stop(self) -> None:
        """Terminate the process; kill it after a limit."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(LIMIT_S)

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def has_said_ready(self) -> bool:
        """Whether the log has "ready". StackError if the process has ended."""
        if not self.is_alive():
            raise StackError(f"{self.name} has ended")
        return '"ready"' in self.log_tail()

    def log_tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""
