"""The fork server's program: `main` imports the modules of its command line, and forks on request.

Each line on standard input is {"module", "arguments", "environment", "log", "status"}; the answer is the child's pid.
When it ends, its exit status is written to the file `status`. The children die with the server.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

CHILD = "pagestream_worker.engine_core"
PROGRAM = "pagestream_worker.core_process"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ForkedChild:
    """The process of an engine, forked from its worker: that has imported all it needs, and computes nothing."""

    def __init__(self, connection: socket.socket) -> None:
        program, worker = importlib.import_module(PROGRAM), os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            signal.set_wakeup_fd(-1)
            program.serve(connection, worker)

    def wait(self) -> int:
        """See child.Child."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """See child.Child."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Children:
    """The forked processes, whose ends are noted as they come."""

    def __init__(self) -> None:
        self._statuses: dict[int, Path] = {}
        signal.signal(signal.SIGCHLD, self._collect)

    def fork(self, order: dict[str, Any]) -> int:
        """Fork a process; returns its pid. Does not return in the process itself."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # it may end before it is known here
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            _become(order)
        self._statuses[pid] = Path(order["status"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        return pid

    def _collect(self, *_: object) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._note(self._statuses.pop(ended[0]), os.waitstatus_to_exitcode(ended[1]))

    def _note(self, file: Path, status: int) -> None:
        written = file.with_name(f"{file.name}.part")
        with suppress(FileNotFoundError):  # the test has ended, and with it its folder
            written.write_text(str(status))
            written.rename(file)


def main() -> None:
    """Import the modules, then serve until the input ends."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    children = Children()
    print("ready", flush=True)
    for line in sys.stdin:
        print(children.fork(json.loads(line)), flush=True)


def _become(order: dict[str, Any]) -> None:
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # with the server
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(order["environment"])
        if CHILD in sys.modules:
            vars(sys.modules[CHILD])["launch"] = ForkedChild
        module = order["module"]
        sys.argv = [module, *order["arguments"]]
        status = importlib.import_module(module).main() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - it must not return into the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
