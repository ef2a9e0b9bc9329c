from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pagestream_kernels import (
    KernelArgumentError,
    KernelUnavailableError,
    paged_decode_attention_reference,
    paged_prefill_attention,
    paged_prefill_attention_reference,
)
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise, sampled

pytestmark = pytest.mark.builds

COVER = pairwise(kernel_cases.FACTORS["paged_prefill"])


@pytest.mark.parametrize("case", sampled(COVER), ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("paged_prefill", case)


@pytest.mark.parametrize(("dtype", "block_size", "window"), sampled([("bfloat16", 16, 45), ("float16", 64, None)]))
def test_chunks_give_a_token_the_same_bits(
    interpreter: KernelWorker, dtype: str, block_size: int, window: int | None
) -> None:
    interpreter.run("prefill_invariance", {"dtype": dtype, "block_size": block_size, "window": window})


@pytest.mark.parametrize(
    ("operator", "dtype", "window", "value"),
    [
        ("prefill", "float32", None, math.inf),
        ("prefill", "bfloat16", 5, -math.inf),
        ("prefill", "float16", None, math.nan),
        ("decode", "float16", None, math.inf),
        ("decode", "bfloat16", 5, math.nan),
    ],
)
def test_a_value_that_is_not_finite_reaches_only_who_sees_it(
    interpreter: KernelWorker, operator: str, dtype: str, window: int | None, value: float
) -> None:
    interpreter.run("infinite_values", {"operator": operator, "dtype": dtype, "window": window, "value": value})


@pytest.mark.parametrize("num_seqs", [1, 9])
def test_every_row_is_in_one_tile(interpreter: KernelWorker, num_seqs: int) -> None:
    interpreter.run("prefill_tiles", {"num_seqs": num_seqs})


def arguments(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {
        "query": torch.randn(25, 4, 64),
        "key_cache": torch.randn(8, 16, 2, 64),
        "value_cache": torch.randn(8, 16, 2, 64),
        "block_tables": torch.tensor([[3, 1, -1], [0, 7, 2]], dtype=torch.int32),
        "cu_query_lens": torch.tensor([0, 20, 25], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 48], dtype=torch.int32),
    }
    return {**tensors, **changes}


def test_reference_matches_contiguous_attention() -> None:
    tensors = arguments()
    actual = paged_prefill_attention_reference(**tensors, scale=0.125)
    for index, blocks in enumerate(([3, 1], [0, 7, 2])):
        start, end = tensors["cu_query_lens"][index : index + 2].tolist()
        length = int(tensors["seq_lens"][index])
        keys, values = (
            tensors[name][blocks].reshape(-1, 2, 64)[:length].transpose(0, 1).repeat_interleave(2, dim=0)
            for name in ("key_cache", "value_cache")
        )
        visible = torch.ones(end - start, length, dtype=torch.bool).tril(length - (end - start))
        query = tensors["query"][start:end].transpose(0, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=0.125)
        torch.testing.assert_close(actual[start:end], expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_reference_of_single_tokens_is_decode() -> None:
    tensors = arguments(query=torch.randn(2, 4, 64), cu_query_lens=torch.tensor([0, 1, 2], dtype=torch.int32))
    prefill = paged_prefill_attention_reference(**tensors, scale=0.125)
    del tensors["cu_query_lens"]
    torch.testing.assert_close(prefill, paged_decode_attention_reference(**tensors, scale=0.125))


WRONG = {
    "query": (torch.randn(25, 4, 64, dtype=torch.float64), "float64"),
    "key_cache": (torch.randn(8, 16, 64), r"\(8, 16, 64\)"),
    "value_cache": (torch.randn(9, 16, 2, 64), r"\(9, 16, 2, 64\)"),
    "block_tables": (torch.zeros(3, 3, dtype=torch.int32), r"\(3, 3\)"),
    "cu_query_lens": (torch.zeros(2, dtype=torch.int32), r"\(2,\)"),
    "seq_lens": (torch.zeros(2), "float32"),
}


@pytest.mark.parametrize("function", [paged_prefill_attention, paged_prefill_attention_reference])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_is_named(function: Callable[..., object], name: str) -> None:
    value, given = WRONG[name]
    with pytest.raises(KernelArgumentError, match=rf"^{name}: expected .*{given}"):
        function(**arguments(**{name: value}), scale=1.0)


def test_out_is_checked() -> None:
    with pytest.raises(KernelArgumentError, match=r"^out: expected shape \(25, 4, 64\)"):
        paged_prefill_attention(**arguments(), scale=1.0, out=torch.empty(25, 4, 32))


def test_compiled_kernel_refuses_host_tensors() -> None:
    with pytest.raises(KernelUnavailableError, match="TRITON_INTERPRET"):
        paged_prefill_attention(**arguments(), scale=1.0)
