from __future__ import annotations

import kernel_cases
import pytest
from kernel_worker import KernelWorker


@pytest.mark.parametrize("kernel", kernel_cases.FACTORS)
def test_benchmark_runs_its_smallest_workload(interpreter: KernelWorker, kernel: str) -> None:
    interpreter.run("benchmark", {"kernel": kernel})
