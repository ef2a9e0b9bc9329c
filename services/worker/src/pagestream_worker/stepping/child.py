"""The process of an engine, as its parent starts, waits for and kills it."""

import os
import signal
import socket
import subprocess
import sys
from typing import Protocol

PROGRAM = "from pagestream_worker.stepping.process_main import main; main()"


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


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (out of memory, or by hand)" if -code == signal.SIGKILL else "")
