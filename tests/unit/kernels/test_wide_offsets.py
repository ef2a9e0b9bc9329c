from __future__ import annotations

import pytest
from support.kernels import wide
from support.kernels.worker import KernelWorker

pytestmark = pytest.mark.builds

CASES = [
    (kernel, tensor, axis) for kernel, tensors in wide.WIDE.items() for tensor, axes in tensors.items() for axis in axes
]


@pytest.mark.parametrize(("kernel", "tensor", "axis"), CASES)
def test_offsets_pass_31_bits(interpreter: KernelWorker, kernel: str, tensor: str, axis: str) -> None:
    interpreter.run("wide_offsets", {"kernel": kernel, "tensor": tensor, "axis": axis})
