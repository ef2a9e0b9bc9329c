from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pagestream_kernels import (
    KernelArgumentError,
    KernelUnavailableError,
    rope_and_cache,
    rope_and_cache_reference,
)
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise, sampled

pytestmark = pytest.mark.builds

COVER = pairwise(kernel_cases.FACTORS["rope_and_cache"])


@pytest.mark.parametrize("case", sampled(COVER), ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("rope_and_cache", case)


def arguments(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    angles = torch.arange(50)[:, None] * 0.1 ** torch.arange(4)
    tensors = {
        "query": torch.randn(3, 4, 8),
        "key": torch.randn(3, 2, 8),
        "value": torch.randn(3, 2, 8),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1),
        "positions": torch.tensor([0, 7, 49]),
        "key_cache": torch.zeros(2, 16, 2, 8),
        "value_cache": torch.zeros(2, 16, 2, 8),
        "slot_mapping": torch.tensor([17, -1, 0]),
    }
    return {**tensors, **changes}


def test_reference_turns_pairs_as_complex_numbers() -> None:
    tensors = arguments()
    before = tensors["query"].clone()
    rope_and_cache_reference(**tensors)
    angles = tensors["positions"][:, None] * 0.1 ** torch.arange(4)
    turned = torch.complex(before[..., :4], before[..., 4:]) * torch.polar(torch.ones(3, 4), angles)[:, None]
    torch.testing.assert_close(tensors["query"], torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-5, atol=1e-5)


def test_reference_writes_each_slot_and_no_other() -> None:
    tensors = arguments()
    rope_and_cache_reference(**tensors)
    assert torch.equal(tensors["value_cache"][1, 1], tensors["value"][0])
    assert torch.equal(tensors["value_cache"][0, 0], tensors["value"][2])
    assert int((tensors["value_cache"] != 0).any(-1).sum()) == 4
    assert int((tensors["key_cache"] != 0).any(-1).sum()) == 4
    torch.testing.assert_close(tensors["key_cache"][1, 1], tensors["key"][0])  # position 0 does not turn


WRONG = {
    "key": (torch.randn(3, 3, 8), r"\(3, 3, 8\)"),
    "value": (torch.randn(3, 2, 8).half(), "float16"),
    "cos_sin": (torch.randn(50, 10), "10"),
    "positions": (torch.zeros(3), "float32"),
    "key_cache": (torch.zeros(2, 16, 2, 4), r"\(2, 16, 2, 4\)"),
    "value_cache": (torch.zeros(2, 8, 2, 8), r"\(2, 8, 2, 8\)"),
    "slot_mapping": (torch.zeros(4, dtype=torch.int64), r"\(4,\)"),
}


@pytest.mark.parametrize("function", [rope_and_cache, rope_and_cache_reference])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_is_named(function: Callable[..., object], name: str) -> None:
    value, given = WRONG[name]
    with pytest.raises(KernelArgumentError, match=rf"^{name}: expected .*{given}"):
        function(**arguments(**{name: value}))


def test_compiled_kernel_refuses_host_tensors() -> None:
    with pytest.raises(KernelUnavailableError, match="rope_and_cache_reference"):
        rope_and_cache(**arguments())
