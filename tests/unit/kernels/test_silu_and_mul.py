from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pagestream_kernels import KernelArgumentError, KernelUnavailableError, silu_and_mul, silu_and_mul_reference
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise

pytestmark = pytest.mark.builds

COVER = pairwise(kernel_cases.FACTORS["silu_and_mul"])


@pytest.mark.parametrize("case", COVER, ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("silu_and_mul", case)


def test_reference_matches_its_definition() -> None:
    gate_up = torch.randn(5, 2 * 123)
    gate, up = gate_up[:, :123], gate_up[:, 123:]
    torch.testing.assert_close(silu_and_mul_reference(gate_up), gate * torch.sigmoid(gate) * up)


def test_reference_writes_to_out() -> None:
    gate_up, out = torch.randn(5, 16), torch.empty(5, 8)
    assert silu_and_mul_reference(gate_up, out=out) is out
    assert torch.equal(out, silu_and_mul_reference(gate_up))


@pytest.mark.parametrize("function", [silu_and_mul, silu_and_mul_reference])
@pytest.mark.parametrize(
    ("gate_up", "out", "text"),
    [
        (torch.ones(5, 8, dtype=torch.float64), None, "^gate_up: expected dtype .*float64"),
        (torch.ones(5, 7), None, r"^gate_up: expected shape .*\(5, 7\)"),
        (torch.ones(8, 8).T, None, "^gate_up: expected stride 1"),
        (torch.ones(5, 8), torch.ones(5, 8), r"^out: expected shape \(5, 4\)"),
        (torch.ones(5, 8), torch.ones(5, 4).half(), "^out: expected dtype"),
    ],
)
def test_wrong_argument_is_named(
    function: Callable[..., object], gate_up: torch.Tensor, out: torch.Tensor | None, text: str
) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        function(gate_up, out=out)


def test_compiled_kernel_refuses_host_tensors() -> None:
    with pytest.raises(KernelUnavailableError, match="silu_and_mul_reference"):
        silu_and_mul(torch.ones(5, 8))
