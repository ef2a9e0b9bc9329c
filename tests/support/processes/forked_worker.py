"""`forked_worker.py SOCKET OPTION ...`: have `forked_workers.py` fork a process with this one's input and output.

It ends with that process. Where that forks none, it becomes the interpreter that it stands for.
"""

import os
import select
import socket
import sys


def main() -> None:
    """Hand over the three files, and wait for the process."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        socket.send_fds(connection, [b"f"], [0, 1, 2])
        pid = int.from_bytes(connection.recv(4), "big")
    if not pid:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])  # noqa: S606
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1):
        os.dup2(nothing, file)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()


if __name__ == "__main__":
    main()
