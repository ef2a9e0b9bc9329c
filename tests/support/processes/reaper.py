"""Ends what a test session has started, when the session itself was killed: `reaper.py PYTEST_PID SESSION FOLDER`.

It waits until pytest has ended, kills every process of the session, and removes its folder. A process belongs to the
session by its environment or its parent; Redis, which overwrites its environment with its title, by its working folder.
"""

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "TEST_SESSIONS"
"""Environment variable: the sessions that a process belongs to, the outermost first, separated by colons."""
LIMIT_S = 30.0
POLL_S = 0.02
TRACKER = b"multiprocessing.resource_tracker"
"""Of a process that ends by itself, after it has removed the shared memory of those that were killed."""


def processes_of(session: str, folder: Path) -> dict[int, str]:
    """Return the processes of a session, but this one, and the command line of each."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended, or belongs to another user
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            pid = int(entry.name)
            parents[pid] = int(parent)
            if _is_tagged(entry, session) or _is_server_below(entry, folder):
                found.add(pid)
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    found.discard(os.getpid())
    return {pid: _command(pid) for pid in sorted(found)}


def kill_all(session: str, folder: Path) -> None:
    """Kill a session's processes until there is none; those that remove shared memory are given time to do so."""
    end = time.monotonic() + LIMIT_S
    while (found := processes_of(session, folder)) and time.monotonic() < end:
        is_patient = time.monotonic() < end - LIMIT_S / 2
        for pid, command in found.items():
            if not (is_patient and TRACKER.decode() in command):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def main() -> None:
    """Wait for pytest's end, then kill and remove."""
    pid, session, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        if os.getppid() == pid:  # else it has ended, and the number may be another process'
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll()
    kill_all(session, folder)
    shutil.rmtree(folder, ignore_errors=True)


def _is_tagged(entry: Path, session: str) -> bool:
    start = f"{VARIABLE}=".encode()
    values = [each[len(start) :] for each in (entry / "environ").read_bytes().split(b"\0") if each.startswith(start)]
    return any(session.encode() in value.split(b":") for value in values)


def _is_server_below(entry: Path, folder: Path) -> bool:
    is_server = (entry / "comm").read_text().startswith(("redis-", "valkey-"))
    return is_server and (entry / "cwd").readlink().is_relative_to(folder)


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


if __name__ == "__main__":
    main()
