from __future__ import annotations

from pathlib import Path

import pytest
from support.kernels.worker import KernelWorker

pytestmark = pytest.mark.builds

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
BENCHMARKS = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


@pytest.mark.parametrize("kernel", BENCHMARKS)
def test_benchmark_runs_its_smallest_workload(interpreter: KernelWorker, kernel: str) -> None:
    interpreter.run("benchmark", {"kernel": kernel})
