"""The process of an engine, as its parent starts, waits for and kills it; and its bond to that parent."""

import os
import signal
import socket
import subprocess
import sys
from typing import Protocol

PROGRAM = "from pagestream_worker.stepping.process_main import main; main()"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Child(Protocol):
    """A started process."""

    @property
    def pid(self) -> int: ...
    def wait(self) -> int:
        """Wait for its end; return its exit code, or the negative number of the signal that ended it."""

    def kill(self) -> None:
        """Kill it, unless it has ended."""


def launch(connection: socket.socket) -> Child:
    """Start the program with a new interpreter, that inherits nothing but its end of a connection.

    To be called on a thread that lives as long as this process: with it the kernel ends the child.
    """
    number = connection.fileno()
    command = [sys.executable, "-P", "-c", PROGRAM, str(number), str(os.getpid())]
    return subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (prctl(2)), however that is and whatever this one does.

    Elsewhere than on Linux the end of the connection alone says so.
    """
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the setting took effect
        os._exit(1)


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (out of memory, or by hand)" if -code == signal.SIGKILL else "")
