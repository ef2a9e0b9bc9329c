from __future__ import annotations

import pytest
import torch
from pagestream_kernels import KernelArgumentError, LoraMatrices, LoraTable, add_lora_reference, cut_tiles
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise, sampled

pytestmark = pytest.mark.builds

COVER = pairwise(kernel_cases.FACTORS["add_lora"])
CPU = torch.device("cpu")


@pytest.mark.parametrize("case", sampled(COVER), ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("add_lora", case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engines_class(interpreter: KernelWorker, dtype: str) -> None:
    interpreter.run("lora_additions", {"shape": (75, (70, 16, 33)), "ranks": "mixed", "dtype": dtype})


def test_reference_matches_its_definition() -> None:
    table = LoraTable([(0, 3), (3, 2)], 4, 1, torch.float32, CPU)
    a, b = torch.randn(2, 4), torch.randn(2, 2)
    table.put(0, [None, LoraMatrices(a, b, 0.5)])
    x, y = torch.randn(3, 4), torch.randn(3, 5)
    expected = y.clone()
    expected[1:, 3:] += x[1:] @ a.T @ b * 0.5
    given = add_lora_reference(y, x, table, cut_tiles(torch.tensor([1, 2]), [0, 2], [0], 2))
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize(
    ("matrices", "text"),
    [
        (LoraMatrices(torch.ones(2, 5), torch.ones(2, 3), 1.0), r"^a: expected shape"),
        (LoraMatrices(torch.ones(2, 4), torch.ones(1, 3), 1.0), r"^b: expected shape \(2, 3\)"),
        (LoraMatrices(torch.ones(2, 4).half(), torch.ones(2, 3), 1.0), "^a: expected dtype"),
        (LoraMatrices(torch.ones(4, 2).T, torch.ones(2, 3), 1.0), "^a: expected a contiguous"),
        (LoraMatrices(torch.ones(9)[1:].view(2, 4), torch.ones(2, 3), 1.0), "^a: .* multiple of 16 bytes"),
    ],
)
def test_wrong_matrices_are_named(matrices: LoraMatrices, text: str) -> None:
    table = LoraTable([(0, 3)], 4, 1, torch.float32, CPU)
    with pytest.raises(KernelArgumentError, match=text):
        table.put(0, [matrices])


def test_rows_of_another_dtype_are_named() -> None:
    table = LoraTable([(0, 3)], 4, 1, torch.bfloat16, CPU)
    tiles = cut_tiles(torch.tensor([0]), [0, 1], [0], 1)
    with pytest.raises(KernelArgumentError, match=r"^table: expected matrices of torch\.float32"):
        add_lora_reference(torch.ones(1, 3), torch.ones(1, 4), table, tiles)
