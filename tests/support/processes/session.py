"""A plugin of pytest: what a session's tests have started ends with the session, however that ends.

Every process of a session inherits a variable that names it, and a temporary folder below pytest's. Where pytest is
killed, `reaper.py` kills them and removes the folder. Where it ends in order, a process that is left fails the session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from support.processes import reaper

GRACE_S = 5.0
"""In which processes that end with this one's pipes may still do so."""
POLL_S = 0.05
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Of Python processes that end with the one that they help."""

at_session_end: list[Callable[[], object]] = []
"""What ends processes that all tests of this pytest process share."""


class Session:
    """A session's name, its folder, and the process that watches it."""

    def __init__(self, folder: Path) -> None:
        self.name = uuid.uuid4().hex
        self.folder = folder
        outer = os.environ.get(reaper.VARIABLE)
        os.environ[reaper.VARIABLE] = f"{outer}:{self.name}" if outer else self.name
        os.environ["SPT_NOENV"] = "1"  # a title that setproctitle sets leaves the environment readable
        temporary = folder / "t"  # short: there are sockets below it
        temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None
        command = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), self.name, str(folder)]
        # In a group of its own: who kills pytest's whole group leaves it. It has the name of the outer session alone.
        environment = {**os.environ, reaper.VARIABLE: outer or ""}
        self._reaper = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)

    def left(self, grace_s: float) -> dict[int, str]:
        """Return the processes that still run after a while, with their command lines."""
        end = time.monotonic() + grace_s
        while found := self._others():
            if time.monotonic() > end:
                break
            time.sleep(POLL_S)
        return found

    def _others(self) -> dict[int, str]:
        found = reaper.processes_of(self.name, self.folder)
        own = {os.getpid(), self._reaper.pid}
        return {
            pid: command
            for pid, command in found.items()
            if pid not in own and not any(helper in command for helper in HELPERS)
        }

    def close(self) -> None:
        """End the process that watches, and whatever is left."""
        self._reaper.kill()
        self._reaper.wait()
        for pid in self._others():
            os.kill(pid, signal.SIGKILL)


_session = pytest.StashKey[Session]()


def pytest_configure() -> None:
    """Start processes with SIGINT's default action, which a background shell has had pytest ignore."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # exec resets a handler, and keeps what is ignored


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Name the session, for its own processes and those of pytest-xdist, and have it watched."""
    if not hasattr(session.config, "workerinput"):
        folder = Path(session.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
        session.config.stash[_session] = Session(folder)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """End what tests share; then fail the session where a process is left."""
    for end in at_session_end:
        end()
    yield
    own = session.config.stash.get(_session, None)
    if own is None:
        return
    left = own.left(GRACE_S)
    own.close()
    if left:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.section("processes that tests have left behind", red=True)
            for pid, command in left.items():
                reporter.line(f"{pid} {command}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
