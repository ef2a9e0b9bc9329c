"""Copies of cache blocks in all layers."""

from __future__ import annotations

import pytest
import torch
from pagestream_kernels import KernelArgumentError, copy_blocks, copy_blocks_reference
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise

PAIRS = torch.tensor([[1, 0]])


@pytest.mark.builds
@pytest.mark.parametrize("case", pairwise(kernel_cases.FACTORS["copy_blocks"]), ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("copy_blocks", case)


@pytest.mark.builds
def test_the_engines_store_copies_in_one_launch(interpreter: KernelWorker) -> None:
    interpreter.run("store_copies", {})


@pytest.mark.parametrize("function", [copy_blocks, copy_blocks_reference])
@pytest.mark.parametrize(
    ("target", "source", "pairs", "text"),
    [
        (torch.zeros(2, 3, 8), torch.zeros(3, 3, 8), PAIRS, r"source: expected shape \(2, \*, 8\)"),
        (torch.zeros(2, 3, 8), torch.zeros(2, 3, 8).half(), PAIRS, "source: expected dtype torch.float32"),
        (torch.zeros(2, 3, 3), torch.zeros(2, 3, 3), PAIRS, "target: .*multiples of 8 bytes, got 3 elements"),
        (torch.zeros(2, 8, 3).transpose(1, 2), torch.zeros(2, 3, 8), PAIRS, "target: .*with stride 3"),
        (torch.zeros(2, 3, 8), torch.zeros(2, 3, 8), torch.tensor([1, 0]), r"pairs: expected shape \(\*, 2\)"),
    ],
)
def test_wrong_argument_is_named(
    function: object, target: torch.Tensor, source: torch.Tensor, pairs: torch.Tensor, text: str
) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        function(target, source, pairs)
