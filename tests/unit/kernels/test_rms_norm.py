from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pagestream_kernels import KernelArgumentError, KernelUnavailableError, rms_norm, rms_norm_reference
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise

pytestmark = pytest.mark.builds

COVER = pairwise(kernel_cases.FACTORS["rms_norm"])


@pytest.mark.parametrize("case", COVER, ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("rms_norm", case)


def test_reference_matches_torch() -> None:
    x, weight, residual = torch.randn(5, 123), torch.randn(123), torch.randn(5, 123)
    expected = torch.nn.functional.rms_norm(x, (123,), weight, eps=1e-5)
    torch.testing.assert_close(rms_norm_reference(x, weight, eps=1e-5), expected)
    normed, summed = rms_norm_reference(x, weight, eps=1e-5, residual=residual)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x + residual, (123,), weight, eps=1e-5))


def test_reference_writes_to_out() -> None:
    x, weight = torch.randn(5, 8), torch.randn(8)
    out = torch.empty(5, 8)
    assert rms_norm_reference(x, weight, eps=1e-5, out=out) is out
    assert torch.equal(out, rms_norm_reference(x, weight, eps=1e-5))


@pytest.mark.parametrize("function", [rms_norm, rms_norm_reference])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"x": torch.ones(5, 8, dtype=torch.int32)}, "^x: expected dtype .*int32"),
        ({"x": torch.ones(8, 8).T}, "^x: expected stride 1"),
        ({"weight": torch.ones(9)}, r"^weight: expected shape \(8\) .*\(9,\)"),
        ({"weight": torch.ones(8).half()}, "^weight: expected dtype .*float16"),
        ({"residual": torch.ones(4, 8)}, r"^residual: expected shape \(5, 8\)"),
        ({"eps": 0.0}, "^eps: expected .*0.0"),
        ({"out": torch.ones(5, 16)[:, :8]}, "^out: expected a contiguous"),
    ],
)
def test_wrong_argument_is_named(function: Callable[..., object], changes: dict[str, object], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        function(**{"x": torch.ones(5, 8), "weight": torch.ones(8), "eps": 1e-5, **changes})


def test_compiled_kernel_refuses_host_tensors() -> None:
    with pytest.raises(KernelUnavailableError, match="rms_norm_reference"):
        rms_norm(torch.ones(5, 8), torch.ones(8), eps=1e-5)
