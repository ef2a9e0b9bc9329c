from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pagestream_kernels import (
    DecodePlan,
    KernelArgumentError,
    KernelUnavailableError,
    paged_decode_attention,
    paged_decode_attention_reference,
    plan_decode,
)
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise

pytestmark = pytest.mark.builds

COVER = pairwise(kernel_cases.FACTORS["paged_decode"])


@pytest.mark.parametrize("case", COVER, ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("paged_decode", case)


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES)
def test_fixed_split_gives_the_same_bits_in_any_batch(interpreter: KernelWorker, dtype: str) -> None:
    interpreter.run("decode_invariance", {"dtype": dtype})


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


# -- the plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 64])
@pytest.mark.parametrize(
    "lengths",
    [[1], [0], [0, 0, 5], [131072], [131072, *([1] * 255)], [257, 255, 256], [4096] * 64],
    ids=lambda lengths: f"{len(lengths)}x{max(lengths)}",
)
def test_plan_gives_every_token_one_slot(lengths: list[int], num_kv_heads: int) -> None:
    plan = plan_decode(torch.tensor(lengths, dtype=torch.int32), num_kv_heads=num_kv_heads)
    check_plan(plan, lengths)


def test_plan_cuts_a_long_sequence_among_short_ones() -> None:
    lengths = [131072, *([16] * 7)]
    plan = plan_decode(torch.tensor(lengths, dtype=torch.int32), num_kv_heads=2)
    slots = plan.seq_slots.tolist()
    assert slots[1] - slots[0] >= 8  # 4 interpreter processors x 4 programs / 2 KV heads
    assert int(plan.split_tokens) <= 131072 // 7


@pytest.mark.parametrize("split_tokens", [None, 48])
def test_tokens_before_a_window_are_no_work(split_tokens: int | None) -> None:
    lengths = [5, 0, 123, 999]
    plan = plan_decode(
        torch.tensor(lengths, dtype=torch.int32), num_kv_heads=2, split_tokens=split_tokens, max_seq_len=999, window=60
    )
    check_plan(plan, [5, 0, 60, 60])


@pytest.mark.parametrize("split_tokens", [1, 48, 1000])
def test_fixed_split_is_kept(split_tokens: int) -> None:
    lengths = [5, 0, 123, 999]
    plan = plan_decode(
        torch.tensor(lengths, dtype=torch.int32), num_kv_heads=2, split_tokens=split_tokens, max_seq_len=999
    )
    assert int(plan.split_tokens) == split_tokens
    check_plan(plan, lengths)


def check_plan(plan: DecodePlan, lengths: list[int]) -> None:
    split = int(plan.split_tokens)
    starts = plan.seq_slots.tolist()
    assert starts[-1] <= plan.num_slots
    for seq, length in enumerate(lengths):
        assert (starts[seq + 1] - starts[seq]) == -(-length // split)
        assert plan.slot_seqs[starts[seq] : starts[seq + 1]].tolist() == [seq] * (starts[seq + 1] - starts[seq])
    assert (plan.slot_seqs[starts[-1] :] == len(lengths)).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"num_kv_heads": 1, "split_tokens": 0, "max_seq_len": 5}, "split_tokens"),
        ({"num_kv_heads": 1, "split_tokens": 8}, "max_seq_len"),
    ],
)
def test_plan_arguments_are_checked(options: dict[str, int], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        plan_decode(torch.tensor([1], dtype=torch.int32), **options)
