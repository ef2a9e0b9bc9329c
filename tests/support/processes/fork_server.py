"""Processes that start in the time of a fork, from a server that has imported everything they need.

Engines and gateways import for seconds of processor time. A test that is about something else than their start forks
them; `test_serve.py`, `test_pod_environment.py` and others start them as users do.
"""

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
from functools import cache
from multiprocessing import spawn
from pathlib import Path

from support.processes.part import Part, StackError
from support.processes.session import at_session_end
from support.processes.waiting import LIMIT_S, descendants_of, wait_until

SERVER = "from support.processes.fork_server_main import main; main()"
ENGINES = ("pagestream_worker.process", "transformers.models.llama")
GATEWAYS = ("pagestream_gateway.__main__",)


class ForkServer:
    """Owns the process that forks (`fork_server_main.py`)."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the imports; the first `fork` waits for them. Forked processes have this environment, too."""
        self._environment = dict(environment)
        self._process = subprocess.Popen(
            [os.fsdecode(spawn.get_executable()), "-c", SERVER, *modules],  # forked itself in a process of pytest-xdist
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            text=True,
        )
        self._is_ready = False

    def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, status: Path
    ) -> int:
        """Run a module's `main` in a process of its own; returns its pid. StackError where the server has ended.

        Args:
            module: with a function `main`.
            arguments: of its command line.
            environment: on top of this process' own.
            log: to which its output is added.
            status: file for its exit status, when it has ended.
        """
        if not self._is_ready:
            self._read_line()
            self._is_ready = True
        if self._process.stdin is None:
            raise StackError("the fork server has no input")
        order = {
            "module": module,
            "arguments": list(arguments),
            "environment": {**os.environ, **self._environment, **environment},
            "log": str(log),
            "status": str(status),
        }
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


@cache
def shared_server(*modules: str) -> ForkServer:
    """Return this process' server of engines or gateways, which ends with it."""
    server = ForkServer(modules, {"OMP_NUM_THREADS": "1"})
    at_session_end.append(server.close)
    return server


@dataclass
class ForkedPart(Part):
    """A part that a fork server starts; `command` is a module and its arguments."""

    server: ForkServer | None = None
    restarts: int = -1
    _pid: int = field(default=0, repr=False)
    _handle: int = field(default=-1, repr=False)
    _log_start: int = field(default=0, repr=False)

    @property
    def pid(self) -> int:
        """Id of the process that was forked last; 0 without one."""
        return self._pid

    def start(self) -> None:
        """Fork the process; its output is added to the log."""
        if self.server is None:
            raise StackError(f"{self.name} has no fork server")
        self.log.touch()
        self._log_start = self.log.stat().st_size
        self.restarts += 1
        module, *arguments = self.command
        self._pid = self.server.fork(module, arguments, self.environment, self.log, self._status)
        self._close_handle()
        with suppress(ProcessLookupError):  # it has ended
            self._handle = os.pidfd_open(self._pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended. It is stopped and continued with its children."""
        if self._handle < 0:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            send_signal(descendants_of(self.pid), number)

    def wait(self) -> int:
        """Wait for the end; returns the exit status. StackError after a limit."""
        if not self._has_ended(LIMIT_S):
            raise StackError(f"{self.name} did not end within {LIMIT_S:.0f} s")
        self._close_handle()
        wait_until(self._status.exists, f"the exit status of {self.name}")
        return int(self._status.read_text())

    def stop(self) -> None:
        """Kill the process."""
        self.signal(signal.SIGKILL)
        self._has_ended(LIMIT_S)
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

    @property
    def _status(self) -> Path:
        return self.log.with_suffix(f".status-{self.restarts}")

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


def run_forked(server: ForkServer, folder: Path, module: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run a module's `main` to its end; returns the exit status and all output."""
    log = folder / f"{module}.log"
    log.unlink(missing_ok=True)
    part = ForkedPart(module, [module, *arguments], log, environment, server=server)
    part.start()
    try:
        return part.wait(), log.read_text()
    finally:
        part.stop()


def send_signal(pids: Collection[int], number: signal.Signals) -> None:
    """Send a signal to those of some processes that run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
