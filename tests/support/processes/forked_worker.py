"""`forked_worker.py SOCKET OPTION ...`: an interpreter that `forked_workers.py` forks, with this process' files.

It ends with the fork. What is none of the programs below becomes the interpreter that this one stands for.
"""

import json
import os
import select
import socket
import sys
from contextlib import suppress

FORKED = (
    "import sys;exec(eval(sys.stdin.readline()))",  # execnet's, a process of pytest-xdist
    "from multiprocessing.forkserver import main",
    "from support.processes.fork_server_main import main",
)


def fork(code: str, arguments: list[str]) -> int:
    """Have a program forked; returns its pid, or 0 where none is."""
    files = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - pathlib takes as long as the rest
    with socket.socket(socket.AF_UNIX) as connection:
        files = [file for file in files if file != connection.fileno() and _is_open(file)]
        connection.connect(sys.argv[1])
        order = {"files": files, "code": code, "arguments": arguments, "environment": {**os.environ}}
        socket.send_fds(connection, [b"f"], files)
        connection.sendall(json.dumps(order).encode())
        connection.shutdown(socket.SHUT_WR)
        pid = int.from_bytes(connection.recv(4), "big")
    if pid:
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in files:
            os.dup2(nothing, file)
    return pid


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:  # it was the listing's own
        return False
    return True


def main() -> None:
    """Have the process forked, and wait for it."""
    arguments = sys.argv[2:]
    place = arguments.index("-c") + 1 if "-c" in arguments else 0
    pid = fork(arguments[place], arguments[place + 1 :]) if place and arguments[place].startswith(FORKED) else 0
    if not pid:
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606
    with suppress(ProcessLookupError):  # it has ended
        poll = select.poll()
        poll.register(os.pidfd_open(pid), select.POLLIN)
        poll.poll()


if __name__ == "__main__":
    main()
