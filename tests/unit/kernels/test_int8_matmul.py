from __future__ import annotations

import pytest
import torch
from pagestream_kernels import KernelArgumentError, int8_matmul_reference
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise

pytestmark = pytest.mark.builds

COVER = pairwise(kernel_cases.FACTORS["int8_matmul"])


@pytest.mark.parametrize("case", COVER, ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("int8_matmul", case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engines_method(interpreter: KernelWorker, dtype: str) -> None:
    interpreter.run("quantised_method", {"dtype": dtype})


def test_reference_matches_its_definition() -> None:
    x, values = torch.randn(3, 64), torch.randint(-128, 128, (5, 64), dtype=torch.int8)
    scales, bias = torch.rand(2, 5), torch.randn(5)
    weight = torch.cat([values[:, :32] * scales[0][:, None], values[:, 32:] * scales[1][:, None]], dim=1)
    torch.testing.assert_close(int8_matmul_reference(x, values, scales, 32, bias), x @ weight.T + bias)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"values": torch.ones(4, 64, dtype=torch.uint8)}, "^values: expected dtype"),
        ({"scales": torch.ones(3, 4)}, r"^scales: expected shape .*\(2, 4\)"),
        ({"group_size": 24}, "^group_size: given 24, expected a multiple of 32"),
    ],
)
def test_wrong_argument_is_named(changes: dict[str, object], text: str) -> None:
    given = {
        "x": torch.ones(2, 64),
        "values": torch.ones(4, 64, dtype=torch.int8),
        "scales": torch.ones(2, 4),
        "group_size": 32,
    }
    with pytest.raises(KernelArgumentError, match=text):
        int8_matmul_reference(**{**given, **changes})  # type: ignore[arg-type]
