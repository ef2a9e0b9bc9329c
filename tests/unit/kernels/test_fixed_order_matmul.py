from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pagestream_kernels import (
    KernelArgumentError,
    KernelUnavailableError,
    fixed_order_matmul,
    fixed_order_matmul_reference,
)
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise, sampled

pytestmark = pytest.mark.builds

COVER = pairwise(kernel_cases.FACTORS["fixed_order_matmul"])


@pytest.mark.parametrize("case", COVER, ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("fixed_order_matmul", case)


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES)
def test_a_row_has_the_same_bits_among_any_number_of_others(interpreter: KernelWorker, dtype: str) -> None:
    interpreter.run("fixed_order_matmul_invariance", {"dtype": dtype, "step": 29})


@pytest.mark.parametrize("target", sampled(["sm_90", "sm_80", "sm_100"]))
def test_loop_copies_ahead_and_multiplies_on_tensor_cores(compiler: KernelWorker, target: str) -> None:
    for outputs in (4096, 28672):
        loop = compiler.run("matmul_loop", {"outputs": outputs, "inputs": 4096, "dtype": "bfloat16", "target": target})
        assert loop["buffers"] >= 3
        assert loop["copies_in_flight"] >= 4  # inputs and weight of two tiles


def test_reference_matches_its_definition() -> None:
    x, weight, bias = torch.randn(5, 24), torch.randn(7, 24), torch.randn(7)
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(fixed_order_matmul_reference(x, weight, bias), expected)


@pytest.mark.parametrize("function", [fixed_order_matmul, fixed_order_matmul_reference])
@pytest.mark.parametrize(
    ("x", "weight", "bias", "text"),
    [
        (torch.ones(5, 8, dtype=torch.float64), torch.ones(4, 8), None, "^x: expected dtype .*float64"),
        (torch.ones(2, 5, 8), torch.ones(4, 8), None, r"^x: expected shape .*\(2, 5, 8\)"),
        (torch.ones(8, 5).T, torch.ones(4, 8), None, "^x: expected stride 1"),
        (torch.ones(5, 8), torch.ones(4, 8).half(), None, "^weight: expected dtype"),
        (torch.ones(5, 8), torch.ones(4, 9), None, r"^weight: expected shape .*\(4, 9\)"),
        (torch.ones(5, 8), torch.ones(8, 4).T, None, "^weight: expected a contiguous tensor"),
        (torch.ones(5, 8), torch.ones(4, 8), torch.ones(5), r"^bias: expected shape .*\(5,\)"),
    ],
)
def test_wrong_argument_is_named(
    function: Callable[..., object], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, text: str
) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        function(x, weight, bias)


def test_compiled_kernel_refuses_host_tensors() -> None:
    with pytest.raises(KernelUnavailableError, match="fixed_order_matmul_reference"):
        fixed_order_matmul(torch.ones(5, 8), torch.ones(4, 8))
