"""Run a program that dies with its supervisor: `python -I -S guard.py SUPERVISOR_PID PROGRAM [ARGUMENT ...]`.

A separate file with few imports, since it delays the start of every part. The program replaces this process (exec), so
it has the pid that the supervisor started.
"""

import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_S = 0.2


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (prctl(2)); the setting survives exec."""
    import ctypes

    # Fires when the thread that started this process ends: start parts from the supervisor's main thread.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def watch_parent(supervisor: int) -> None:
    """Do the same where the kernel has no such setting: a second process polls the supervisor, and kills the program
    when that has ended.
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
    """Whether a process of this id exists that may be our supervisor.

    A process of another user is not: only the supervisor's own user (and root, who may signal any process) can read the
    file that names it, so the id has been reused.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main(arguments: list[str]) -> None:
    """Bind this process to its supervisor, then exec the program."""
    supervisor, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        die_with_parent()
    else:
        watch_parent(supervisor)
    if os.getppid() != supervisor:  # it died before the setting took effect
        os._exit(1)
    try:
        os.execvp(program[0], program)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot start {program[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
