"""A process that interprets or compiles kernels, because one process can only do one of them: Triton decides at import.

`KernelWorker` is the test's end; run as a script this file is the other end. Both speak one JSON line a call.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from inspect import getfile
from pathlib import Path
from typing import IO, Any, Literal

Mode = Literal["interpret", "compile"]

REPOSITORY = Path(__file__).resolve().parents[3]
TESTS = REPOSITORY / "tests"
STOP_LIMIT_S = 10.0


class KernelWorker:
    """Calls functions in a process of its own; a failure comes back as an AssertionError with its traceback there."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - close() closes it
        self._builds = tempfile.TemporaryDirectory(prefix="kernel-builds-")  # Triton's own cache, a few 100 kB a build
        self._pending = b""
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if self._mode == "interpret":
            environment["TRITON_INTERPRET"] = "1"
        environment |= {"TRITON_CACHE_DIR": self._builds.name, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
        return subprocess.Popen(
            [sys.executable, str(Path(__file__)), self._mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )

    def __enter__(self) -> KernelWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def run(self, function: Callable[..., object], *arguments: object, limit_s: float = 250.0) -> Any:
        """Call a function of a module's top level with arguments that travel as JSON and seed torch's random numbers.

        Raises:
            AssertionError: the function raised, or took the process with it.
        """
        if self._process.poll() is not None:  # the last call killed it (a kernel can write anywhere)
            self._stop()
            self._process = self._start()
        module = ".".join(Path(getfile(function)).relative_to(TESTS).with_suffix("").parts)
        call = {"module": module, "name": function.__name__, "arguments": arguments}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._receive(limit_s)
        if "error" in answer:
            raise AssertionError(f"{function.__name__} {arguments} ({self._mode}):\n{answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the worker; harmless when it is gone."""
        self._stop()
        self._log.close()
        self._builds.cleanup()

    def _stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._pending = b""

    def _receive(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(left, 0.0))
            chunk = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                self._process.kill()
                self._process.wait()
                reason = "ended" if ready else f"gave no answer in {limit_s} s and was killed"
                self._log.seek(0)
                raise AssertionError(f"the {self._mode} worker {reason}:\n{self._log.read().decode()[-4000:]}")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return dict(json.loads(line))


@cache
def shared_worker(mode: Mode) -> KernelWorker:
    """Return this process' worker of a kind, which ends with it: each starts for 3 s of processor time."""
    from support.processes.session import at_session_end  # which the other end needs not

    worker = KernelWorker(mode)
    at_session_end.append(worker.close)
    return worker


def _serve(mode: Mode) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints goes to the log
    import torch

    torch.set_num_threads(1)
    if mode == "interpret":
        fix_order_of_additions()
    for line in sys.stdin:
        call = json.loads(line)
        try:
            torch.manual_seed(zlib.crc32(json.dumps(call["arguments"]).encode()))
            answer = {"result": getattr(importlib.import_module(call["module"]), call["name"])(*call["arguments"])}
        except BaseException:  # noqa: BLE001 - whatever a function raises is its result, pytest's own exceptions too
            answer = {"error": traceback.format_exc(limit=8)}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # without the seconds that the libraries take to unload


def fix_order_of_additions() -> None:
    """From now on each element of an interpreted `tl.dot` depends on its row and its column alone.

    The interpreter computes it by `numpy.matmul`. OpenBLAS gives the last rows of a tile to other microkernels than the
    first ones: with its kernels for AVX2 an element's bits depend on the row's place in the tile (with those for
    AVX-512 they do not). A tensor core has no such places, so tests of bits need a product that has none either.
    """
    import numpy as np
    from triton.runtime import interpreter

    class OwnMatmul:
        """NumPy, but for `matmul`: by NumPy's own loops, none of which sees where a row lies."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        @staticmethod
        def matmul(left: Any, right: Any, dtype: Any) -> Any:
            return np.einsum("...mk,...kn->...mn", left.astype(dtype), right.astype(dtype))

    interpreter.np = OwnMatmul()


if __name__ == "__main__":
    _serve("interpret" if sys.argv[1] == "interpret" else "compile")
