from __future__ import annotations

import pytest
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker

pytestmark = pytest.mark.builds


@pytest.mark.parametrize("kernel", kernel_cases.FACTORS)
def test_benchmark_runs_its_smallest_workload(interpreter: KernelWorker, kernel: str) -> None:
    interpreter.run("benchmark", {"kernel": kernel})
