"""A process that interprets or compiles kernels, because one process can only do one of them: Triton decides at import.

`KernelWorker` is the test's end; run as a script this file is the other end. Both speak one JSON line a case.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

Mode = Literal["interpret", "compile"]

REPOSITORY = Path(__file__).resolve().parents[3]
STOP_LIMIT_S = 10.0


class KernelWorker:
    """Runs cases in a process of its own; a failure comes back as an AssertionError with the worker's traceback."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - close() closes it
        self._builds = tempfile.TemporaryDirectory(prefix="kernel-builds-")  # Triton's own cache, a few 100 kB a build
        self._pending = b""
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        environment.pop("TRITON_INTERPRET", None)
        if self._mode == "interpret":
            environment["TRITON_INTERPRET"] = "1"
        environment["TRITON_CACHE_DIR"] = self._builds.name
        environment["OMP_NUM_THREADS"] = "1"
        environment["PYTHONPATH"] = str(REPOSITORY / "tests")
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

    def run(self, kernel: str, case: dict[str, Any], *, limit_s: float = 110.0) -> dict[str, Any]:
        """The worker's result for one case; AssertionError if it failed there or took the process with it."""
        if self._process.poll() is not None:  # the last case killed it (a kernel can write anywhere)
            self._stop()
            self._process = self._start()
        line = json.dumps({"kernel": kernel, "case": case}) + "\n"
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
        answer = self._receive(limit_s)
        if not answer["ok"]:
            raise AssertionError(f"{kernel} {case} ({self._mode}):\n{answer['error']}")
        return dict(answer["result"])

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


def _serve(mode: Mode) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints goes to the log
    import torch

    torch.set_num_threads(1)
    run = _runner(mode)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": True, "result": run(request["kernel"], request["case"])}
        except Exception:  # noqa: BLE001 - whatever a case raises is its result
            answer = {"ok": False, "error": traceback.format_exc(limit=8)}
        print(json.dumps(answer), file=answers, flush=True)


def _runner(mode: Mode) -> Any:
    import torch

    if mode == "interpret":
        from support.kernels import cases as kernel_cases
        from support.kernels.interpreter import fix_order_of_additions

        fix_order_of_additions()

        def interpret(kernel: str, case: dict[str, Any]) -> dict[str, Any]:
            kernel_cases.check(kernel, case, torch.device("cpu"))
            return {}

        return interpret

    from dataclasses import asdict

    from support.kernels import builds as kernel_builds
    from support.kernels import launches

    def compile_case(kernel: str, case: dict[str, Any]) -> dict[str, Any]:
        if kernel in launches.QUESTIONS:
            return dict(launches.QUESTIONS[kernel](case))
        return {name: asdict(usage) for name, usage in kernel_builds.build(kernel, case).items()}

    return compile_case


if __name__ == "__main__":
    _serve("interpret" if sys.argv[1] == "interpret" else "compile")
