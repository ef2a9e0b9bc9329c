"""The fork server's program: `python fork_server_main.py MODULE ...` imports the modules and forks on request.

Each line on standard input is {"module", "arguments", "environment", "log"}; the answer is the child's pid. The
children die with the server.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

from pagestream_cli.supervisor.guard import die_with_parent
from pagestream_worker.stepping import child, process_main


class ForkedChild:
    """The process of an engine, forked from its worker: that has imported all it needs, and computes nothing."""

    def __init__(self, connection: socket.socket) -> None:
        worker = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            signal.set_wakeup_fd(-1)
            process_main.serve(connection, worker)

    def wait(self) -> int:
        """See child.Child."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """See child.Child."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def main() -> None:
    """Import the modules, then serve until the input ends."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects children
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(order)
        print(pid, flush=True)


def _become(order: dict[str, Any]) -> None:
    status = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(order["environment"])
        vars(child)["launch"] = ForkedChild
        module = order["module"]
        sys.argv = [module, *order["arguments"]]
        status = sys.modules[module].main() or 0
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
