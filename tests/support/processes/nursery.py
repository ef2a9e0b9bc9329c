"""Processes that start in the time of a fork: a nursery has imported everything that they need."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.processes.stack import Part, StackError

SERVER = Path(__file__).with_name("nursery_server.py")
END_LIMIT_S = 15.0


class Nursery:
    """Owns the process that forks."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts to import; the first `fork` waits for it."""
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        self._is_ready = False

    def fork(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Run a module's `main` in a process of its own; its pid. StackError."""
        if not self._is_ready:
            self._hear()
            self._is_ready = True
        if self._process.stdin is None:
            raise StackError("the nursery has no input")
        order = {"module": module, "arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._hear())

    def close(self) -> None:
        """End it, and with it whatever it forked."""
        with self._process:
            self._process.kill()

    def _hear(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise StackError("the nursery has ended")
        return line


@dataclass
class Sapling(Part):
    """A part that a nursery forks. `command` holds a module and its arguments."""

    nursery: Nursery | None = None
    pid: int = 0
    restarts: int = -1
    _handle: int = field(default=-1, repr=False)
    _log_start: int = field(default=0, repr=False)

    def start(self) -> None:
        """Fork it; its output is added to the log."""
        if self.nursery is None:
            raise StackError(f"{self.name} has no nursery")
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        module, *arguments = self.command
        self.pid = self.nursery.fork(module, arguments, self.environment, self.log)
        self._close_handle()
        with suppress(ProcessLookupError):  # it has ended already
            self._handle = os.pidfd_open(self.pid)
        self.restarts += 1

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; one that has ended gets none."""
        if self._handle >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def wait(self) -> int:
        """Wait for its end; the kernel has its exit status. StackError after a limit."""
        if not self._has_ended(END_LIMIT_S):
            raise StackError(f"{self.name} did not end within {END_LIMIT_S:.0f} s")
        self._close_handle()
        return 0

    def stop(self) -> None:
        """End it the hard way: whatever it does at its end is tested elsewhere."""
        self.signal(signal.SIGKILL)
        self._has_ended(END_LIMIT_S)
        self._close_handle()

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._handle >= 0 and not self._has_ended(0.0)

    def has_said_ready(self) -> bool:
        """Whether it has said so since its last start."""
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
