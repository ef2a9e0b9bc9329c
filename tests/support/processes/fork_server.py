"""Processes that start in the time of a fork, from a server that has imported everything they need."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.processes.stack import Part, StackError
from support.processes.waiting import descendants_of

SERVER = Path(__file__).with_name("fork_server_main.py")
END_LIMIT_S = 60.0


class ForkServer:
    """Owns the process that forks (`fork_server_main.py`)."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the imports; the first `fork` waits for them."""
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        self._is_ready = False

    def fork(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Run a module's `main` in a process of its own; returns its pid. StackError where the server has ended."""
        if not self._is_ready:
            self._read_line()
            self._is_ready = True
        if self._process.stdin is None:
            raise StackError("the fork server has no input")
        order = {"module": module, "arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._read_line())

    def close(self) -> None:
        """Kill the server, and with it all processes that it forked."""
        with self._process:
            self._process.kill()

    def _read_line(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise StackError("the fork server has ended")
        return line


@dataclass
class ForkedPart(Part):
    """A part that a fork server starts; `command` is a module and its arguments."""

    server: ForkServer | None = None
    pid: int = 0
    restarts: int = -1
    _handle: int = field(default=-1, repr=False)
    _log_start: int = field(default=0, repr=False)

    def start(self) -> None:
        """Fork the process; its output is added to the log."""
        if self.server is None:
            raise StackError(f"{self.name} has no fork server")
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        module, *arguments = self.command
        self.pid = self.server.fork(module, arguments, self.environment, self.log)
        self._close_handle()
        with suppress(ProcessLookupError):  # it has ended
            self._handle = os.pidfd_open(self.pid)
        self.restarts += 1

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended. It is stopped and continued with its children."""
        if self._handle < 0:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            send_signal(descendants_of(self.pid), number)

    def wait(self) -> int:
        """Wait for the end; StackError after a limit. Returns 0: the fork server's kernel discards the exit status."""
        if not self._has_ended(END_LIMIT_S):
            raise StackError(f"{self.name} did not end within {END_LIMIT_S:.0f} s")
        self._close_handle()
        return 0

    def stop(self) -> None:
        """Kill the process."""
        self.signal(signal.SIGKILL)
        self._has_ended(END_LIMIT_S)
        self._close_handle()

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._handle >= 0 and not self._has_ended(0.0)

    def has_said_ready(self) -> bool:
        """Whether the log has "ready" since the last start. StackError if the process has ended."""
        if not self.is_alive():
            raise StackError(f"{self.name} has ended\n{self.log_tail()}")
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return b'"ready"' in log.read()

    def _has_ended(self, limit_s: float) -> bool:
        if self._handle < 0:
            return True
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))

    def _close_handle(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def send_signal(pids: Collection[int], number: signal.Signals) -> None:
    """Send a signal to those of some processes that run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
