from __future__ import annotations

import os
import signal

import pytest
from support.kernels.worker import KernelWorker

pytestmark = pytest.mark.builds

CASE = {"shape": [1, 64], "dtype": "float32", "strided": False}


def test_failure_names_its_case() -> None:
    with KernelWorker("interpret") as worker:
        with pytest.raises(AssertionError, match=r"(?s)silu_and_mul .*float31.*Traceback.*KeyError"):
            worker.run("silu_and_mul", {**CASE, "dtype": "float31"})
        assert worker.run("silu_and_mul", CASE) == {}


def test_worker_that_died_fails_one_case() -> None:
    with KernelWorker("interpret") as worker:
        worker.run("silu_and_mul", CASE)
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(AssertionError, match=r"gave no answer in 0\.1 s and was killed"):
            worker.run("silu_and_mul", CASE, limit_s=0.1)
        assert worker.run("silu_and_mul", CASE) == {}
