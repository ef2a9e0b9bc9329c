from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pagestream_kernels import (
    KernelArgumentError,
    KernelUnavailableError,
    filter_and_draw,
    filter_and_draw_reference,
)
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise

pytestmark = pytest.mark.builds

COVER = pairwise(kernel_cases.FACTORS["filter_and_draw"])


@pytest.mark.parametrize("case", COVER, ids=kernel_cases.case_id)
def test_kernel_draws_the_tokens_of_the_reference_and_of_the_engine(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("filter_and_draw", case)


@pytest.mark.slow
def test_many_draws_are_the_engines(interpreter: KernelWorker) -> None:
    interpreter.run("filter_and_draw_tokens", {"rows": 120})


def test_a_row_without_a_token_is_marked_alone(interpreter: KernelWorker) -> None:
    interpreter.run("filter_and_draw_nothing", {})


def test_reference_follows_the_softmax_by_chi_square() -> None:
    logits, draws = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 0.2]), 20_000
    seeds, top_k = torch.arange(draws), torch.full((draws,), 4)
    rows = logits.repeat(draws, 1)
    token_ids, _ = filter_and_draw_reference(rows, torch.ones(draws), seeds, seeds % 50, top_k=top_k)
    counts, kept = torch.bincount(token_ids, minlength=8).double(), torch.tensor([1, 2, 4, 5])
    assert counts.sum() == counts[kept].sum()
    expected = torch.softmax(logits[kept].double(), 0) * draws
    assert ((counts[kept] - expected) ** 2 / expected).sum().item() < 16.3  # 3 degrees of freedom, p = 0.001


GIVEN: dict[str, Any] = {
    "logits": torch.ones(5, 8),
    "temperatures": torch.ones(5),
    "seeds": torch.ones(5, dtype=torch.int64),
    "positions": torch.ones(5, dtype=torch.int64),
}


@pytest.mark.parametrize("function", [filter_and_draw, filter_and_draw_reference])
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"logits": torch.ones(5, 8).half()}, "^logits: expected dtype .*float16"),
        ({"logits": torch.ones(5)}, r"^logits: expected shape .*\(5,\)"),
        ({"logits": torch.ones(5, 0)}, r"^logits: expected at least one token"),
        ({"logits": torch.ones(8, 5).T}, "^logits: expected stride 1"),
        ({"temperatures": torch.ones(4)}, r"^temperatures: expected shape \(5\)"),
        ({"seeds": torch.ones(5)}, "^seeds: expected dtype .*float32"),
        ({"top_k": torch.ones(5, dtype=torch.int32)}, "^top_k: expected dtype .*int32"),
        ({"top_p": torch.ones(5, 2)[:, 0]}, "^top_p: expected stride 1"),
    ],
)
def test_wrong_argument_is_named(function: Callable[..., object], wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        function(**{**GIVEN, **wrong})


def test_compiled_kernel_refuses_host_tensors() -> None:
    with pytest.raises(KernelUnavailableError, match="filter_and_draw_reference"):
        filter_and_draw(**GIVEN)
