"""Runs a program that does not outlive its supervisor: `python -I -S guard.py SUPERVISOR_PID PROGRAM [ARGUMENT ...]`.

A file of its own that imports next to nothing: it stands before every part's start. The program takes over this
process, so its pid is the one that the supervisor started.
"""

import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_S = 0.2


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies (prctl(2)); the wish survives exec."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def watch_parent(supervisor: int) -> None:
    """The same where the kernel has no such thing: a second process looks whether the supervisor lives, and kills the
    program when not.
    """
    program = os.getpid()
    if os.fork():
        return
    os.closerange(0, 3)
    while os.getppid() == program:
        if not is_alive(supervisor):
            os.kill(program, signal.SIGKILL)
            break
        time.sleep(POLL_S)
    os._exit(0)


def is_alive(pid: int) -> bool:
    """Whether a process of this number exists that may be a supervisor of ours.

    Another user's is none: a supervisor keeps its user, and only its user (and root, who may signal anybody) can read
    the file that names it. So its number was given away again.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main(arguments: list[str]) -> None:
    """Bind this process to its supervisor, then become the program."""
    supervisor, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        die_with_parent()
    else:
        watch_parent(supervisor)
    if os.getppid() != supervisor:  # it died before the kernel knew our wish
        os._exit(1)
    try:
        os.execvp(program[0], program)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot start {program[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
