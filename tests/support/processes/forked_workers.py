"""A plugin of pytest: pytest-xdist's processes are forked from one that has imported all tests, once for all of them.

Each would import them for itself otherwise, for 10 s of processor time. As the program `forked_workers.py SOCKET PYTHON
ARGUMENTS ...` this file is that process: it collects with pytest's own arguments, then forks for whoever connects.
PYTHON connects (`forked_worker.py`): it stands for the interpreter that pytest-xdist would start, and in its processes
for `multiprocessing`'s, whose fork servers then need to import nothing.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from functools import partial
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
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""A fork has none of the threads that libraries have started by then, and some of those wait for theirs."""
END_LIMIT_S = 5.0
POLL_S = 0.02
MOST_FILES = 250
"""Linux passes no more at once."""
PLACES = "FORKED_WORKERS_PATH"
"""Environment variable: `sys.path` of the process that imports."""

_importing = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Start the process that imports, and have each of pytest-xdist's processes forked from it."""
    if len(specs) < 2 or not all(spec.popen and not spec.python for spec in specs):
        return
    base = Path(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    address, python = base / "workers", base / "python"
    command = shlex.join([sys.executable, "-I", "-S", str(CLIENT), str(address)])
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        arguments = [*map(str, config.invocation_params.args), "-n0", "--collect-only"]
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(listener.fileno()), str(python), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**ONE_THREAD, **os.environ, "TOKENIZERS_PARALLELISM": "false", PLACES: json.dumps(sys.path)},
            pass_fds=[listener.fileno()],
        )
    config.stash[_importing] = process
    for spec in specs:
        spec.python = str(python)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """End it after what it has forked, whose processor time is pytest's then."""
    yield
    process = session.config.stash.get(_importing, None)
    if process is None or process.stdin is None:
        return
    with process:
        process.stdin.close()
        try:
            process.wait(2 * END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()


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
    python, threshold = sys.argv[2], gc.get_threshold()
    is_whole = pytest.main(sys.argv[3:], plugins=[AsWorker()]) in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )
    gc.set_threshold(*threshold)
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            break
        connection, _ = listener.accept()
        with connection:
            _, files, _, _ = socket.recv_fds(connection, 1, MOST_FILES)
            order = json.loads(b"".join(iter(partial(connection.recv, 65536), b"")))
            # A test file that can't be imported is left half imported: each process says so for itself.
            pid = os.fork() if is_whole else 0
            if pid == 0 and is_whole:
                listener.close()
                connection.close()
                _become(order, files, python)
            connection.sendall(pid.to_bytes(4, "big"))
        for file in files:
            os.close(file)
    end = time.monotonic() + END_LIMIT_S
    while _reap() and time.monotonic() < end:
        time.sleep(POLL_S)


def _reap(*_: object) -> bool:
    """Wait for the children that have ended; return whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _become(order: dict[str, Any], files: Sequence[int], python: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(order["files"]) + 1) for file in files]
    for file in files:
        os.close(file)
    for source, target in zip(above, order["files"], strict=True):
        os.dup2(source, target)
        os.close(source)
    sys.stdin, sys.stdout, sys.stderr = (open(file, mode, closefd=False) for file, mode in enumerate("rww"))  # noqa: SIM115
    os.environ.clear()
    os.environ.update({**ONE_THREAD, **order["environment"]})
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:0] = own
    sys.argv = ["-c", *order["arguments"]]
    main_module = sys.modules["__main__"] = ModuleType("__main__")  # which has no file that a spawned process would run
    multiprocessing.set_executable(python)
    status = 1
    try:
        exec(order["code"], vars(main_module))  # noqa: S102 - what `python -c` was to run
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - it must not return into the loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
