"""A plugin of pytest: pytest-xdist's processes are forked from one that has imported all tests, once for all of them.

Each would import them for itself otherwise, for 10 s of processor time. As the program `forked_workers.py SOCKET
ARGUMENTS ...` this file is that process: it collects with pytest's own arguments, then forks for whoever connects.
`forked_worker.py` connects, in the place of the interpreter that pytest-xdist would start.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CLIENT = Path(__file__).with_name("forked_worker.py")
IMPORTED_LATER = (
    "pagestream_engine.engine",
    "pagestream_engine.runner",
    "pagestream_gateway.__main__",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
)
"""What test files import within their tests, for seconds."""
PLACES = "FORKED_WORKERS_PATH"
"""Environment variable: `sys.path` of the process that imports."""


def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Start the process that imports, and have each of pytest-xdist's processes forked from it."""
    from support.processes.session import at_session_end

    if len(specs) < 2 or not all(spec.popen and not spec.python for spec in specs):
        return
    base = Path(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    address = base / "workers"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        arguments = [*map(str, config.invocation_params.args), "-n0", "--collect-only"]
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(listener.fileno()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # A fork has none of the threads that a library may have started by then.
            env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **os.environ, PLACES: json.dumps(sys.path)},
            pass_fds=[listener.fileno()],
        )

    def end() -> None:
        with process:
            process.kill()

    at_session_end.append(end)
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-I", "-S", str(CLIENT), str(address)])


class AsWorker:
    """A plugin: nothing is reported, and no session is begun."""

    @staticmethod
    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(config: pytest.Config) -> None:
        """Be taken for one of pytest-xdist's processes."""
        config.workerinput = {"workerid": "imports"}  # type: ignore[attr-defined]

    @staticmethod
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish() -> None:
        """Import what tests of the engine import later, while pytest still looks at what is imported."""
        if "torch" in sys.modules:
            for name in IMPORTED_LATER:
                importlib.import_module(name)


def main() -> None:
    """Import, then fork for each connection, until whoever started this ends."""
    sys.path[:] = json.loads(os.environ.pop(PLACES))
    listener = socket.socket(fileno=int(sys.argv[1]))
    status = pytest.main(sys.argv[2:], plugins=[AsWorker()])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            return
        connection, _ = listener.accept()
        with connection:
            _, files, _, _ = socket.recv_fds(connection, 1, 3)
            # A test file that can't be imported is left half imported: each process says so for itself.
            pid = os.fork() if status == pytest.ExitCode.OK else 0
            if pid == 0 and status == pytest.ExitCode.OK:
                listener.close()
                _become_worker(files)
            connection.sendall(pid.to_bytes(4, "big"))
        for file in files:
            os.close(file)


def _become_worker(files: Sequence[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, source in enumerate(files):
        os.dup2(source, target)
        os.close(source)
    sys.stdin, sys.stdout, sys.stderr = (open(file, mode, closefd=False) for file, mode in enumerate("rww"))  # noqa: SIM115
    sys.argv = ["-c"]
    sys.modules["__main__"] = ModuleType("__main__")  # which has no file that a spawned process would run
    try:
        exec("import sys;exec(eval(sys.stdin.readline()))", vars(sys.modules["__main__"]))  # noqa: S102 - execnet's own
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
