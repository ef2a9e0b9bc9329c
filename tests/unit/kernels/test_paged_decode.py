from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pagestream_kernels import (
    KernelArgumentError,
    KernelUnavailableError,
    paged_decode_attention,
    paged_decode_attention_reference,
)
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise, sampled

pytestmark = pytest.mark.builds

COVER = pairwise(kernel_cases.FACTORS["paged_decode"])


@pytest.mark.parametrize("case", sampled(COVER), ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("paged_decode", case)


@pytest.mark.parametrize(
    ("dtype", "block_size", "window"), sampled([("float16", 64, 70), ("float32", 16, None), ("bfloat16", 128, None)])
)
def test_fixed_splits_give_a_row_the_same_bits_in_any_batch(
    interpreter: KernelWorker, dtype: str, block_size: int, window: int | None
) -> None:
    interpreter.run("decode_invariance", {"dtype": dtype, "block_size": block_size, "window": window})


@pytest.mark.parametrize("split_tokens", [None, 128])
@pytest.mark.parametrize("num_seqs", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 7, 20))])
def test_every_tile_is_read_once(interpreter: KernelWorker, num_seqs: int, split_tokens: int | None) -> None:
    interpreter.run("decode_shares", {"num_seqs": num_seqs, "split_tokens": split_tokens})


def arguments(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {
        "query": torch.randn(2, 4, 64),
        "key_cache": torch.randn(8, 16, 2, 64),
        "value_cache": torch.randn(8, 16, 2, 64),
        "block_tables": torch.tensor([[3, 1, -1], [0, 7, 2]], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 48], dtype=torch.int32),
    }
    return {**tensors, **changes}


def test_reference_matches_contiguous_attention() -> None:
    tensors = arguments()
    actual = paged_decode_attention_reference(**tensors, scale=0.125)
    for index, blocks in enumerate(([3, 1], [0, 7, 2])):
        length = int(tensors["seq_lens"][index])
        keys, values = (
            tensors[name][blocks].reshape(-1, 2, 64)[:length].transpose(0, 1).repeat_interleave(2, dim=0)
            for name in ("key_cache", "value_cache")
        )
        query = tensors["query"][index][:, None]
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=0.125)
        torch.testing.assert_close(actual[index], expected[:, 0], rtol=1e-5, atol=1e-5)


def test_reference_gives_zeros_for_an_empty_sequence() -> None:
    empty = torch.tensor([0, 48], dtype=torch.int32)
    actual = paged_decode_attention_reference(**arguments(seq_lens=empty), scale=1.0)
    assert torch.equal(actual[0], torch.zeros(4, 64))
    assert actual[1].abs().sum() > 0


def test_reference_of_several_rows_is_that_of_each() -> None:
    tensors, starts = arguments(query=torch.randn(5, 4, 64)), torch.tensor([0, 2, 5], dtype=torch.int32)
    lse = torch.empty(5, 4)
    rows = paged_decode_attention_reference(**tensors, scale=0.125, cu_query_lens=starts, max_query_len=3, lse=lse)
    for row, (seq, length) in enumerate([(0, 19), (0, 20), (1, 46), (1, 47), (1, 48)]):
        alone = arguments(query=tensors["query"][row : row + 1], key_cache=tensors["key_cache"])
        alone["value_cache"], alone["block_tables"] = tensors["value_cache"], tensors["block_tables"][seq : seq + 1]
        alone["seq_lens"] = torch.tensor([length], dtype=torch.int32)
        own_lse = torch.empty(1, 4)
        torch.testing.assert_close(
            paged_decode_attention_reference(**alone, scale=0.125, lse=own_lse)[0], rows[row], rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(own_lse[0], lse[row])


def test_reference_writes_to_out() -> None:
    tensors, out = arguments(), torch.empty(2, 4, 64)
    assert paged_decode_attention_reference(**tensors, scale=1.0, out=out) is out
    assert torch.equal(out, paged_decode_attention_reference(**tensors, scale=1.0))


WRONG = {
    "query": (torch.randn(2, 4, 64, dtype=torch.float64), "float64"),
    "key_cache": (torch.randn(8, 16, 2, 32), r"\(8, 16, 2, 32\)"),
    "value_cache": (torch.randn(8, 16, 2, 64, dtype=torch.float16), "float16"),
    "block_tables": (torch.zeros(2, 3, dtype=torch.int64), "int64"),
    "seq_lens": (torch.zeros(3, dtype=torch.int32), r"\(3,\)"),
}


@pytest.mark.parametrize("function", [paged_decode_attention, paged_decode_attention_reference])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_is_named(function: Callable[..., object], name: str) -> None:
    value, given = WRONG[name]
    with pytest.raises(KernelArgumentError, match=rf"^{name}: expected .*{given}"):
        function(**arguments(**{name: value}), scale=1.0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"key_cache": torch.randn(8, 12, 2, 64), "value_cache": torch.randn(8, 12, 2, 64)}, "block_size.*got 12"),
        ({"query": torch.randn(2, 5, 64)}, "num_heads.*num_kv_heads=2, got 5"),
        ({"query": torch.randn(2, 64, 4).transpose(1, 2)}, "query: expected stride 1"),
        ({"key_cache": torch.randn(8, 16, 2, 320), "value_cache": torch.randn(8, 16, 2, 320)}, "key_cache"),
    ],
)
def test_geometry_is_checked(changes: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        paged_decode_attention(**arguments(**changes), scale=1.0)


def test_scale_and_type_are_checked() -> None:
    with pytest.raises(KernelArgumentError, match="scale"):
        paged_decode_attention(**arguments(), scale=math.nan)
    with pytest.raises(KernelArgumentError, match=r"query: expected a torch\.Tensor, got list"):
        paged_decode_attention(**arguments(query=[1.0]), scale=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": 0}, "window: expected at least 1 token, got 0"),
        ({"soft_cap": 0.0}, "soft_cap: expected a finite number > 0"),
        ({"soft_cap": math.inf}, "soft_cap: expected a finite number > 0"),
        ({"sinks": torch.zeros(3)}, r"sinks: expected shape \(4\)"),
        ({"sinks": torch.zeros(4, dtype=torch.float16)}, "sinks: expected dtype"),
    ],
)
@pytest.mark.parametrize("function", [paged_decode_attention, paged_decode_attention_reference])
def test_options_are_checked(function: Callable[..., object], options: dict[str, object], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        function(**arguments(), scale=1.0, **options)


def test_plan_of_another_batch_is_refused(interpreter: KernelWorker) -> None:
    interpreter.run("decode_wrong_plan", {"dtype": "float32"})


def test_compiled_kernel_refuses_host_tensors() -> None:
    with pytest.raises(KernelUnavailableError, match="paged_decode_attention_reference"):
        paged_decode_attention(**arguments(), scale=1.0)
