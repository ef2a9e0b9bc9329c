"""How the KV work of a decode step is divided among programs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pagestream_kernels import (
    DecodePlan,
    KernelArgumentError,
    KernelUnavailableError,
    plan_decode,
    plan_decode_reference,
)
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise

COVER = pairwise(kernel_cases.FACTORS["plan_decode"])


@pytest.mark.builds
@pytest.mark.parametrize("case", COVER, ids=kernel_cases.case_id)
def test_each_unit_is_in_one_share(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("plan_decode", case)


@pytest.mark.builds
@settings(max_examples=40, deadline=None)
@example(lengths=[131072, *([1] * 255)], rows=None, window=None, split_tokens=None, num_kv_heads=64, programs=66)
@given(
    lengths=st.one_of(
        st.lists(st.integers(0, 3000), min_size=1, max_size=12),
        st.lists(st.sampled_from([0, 1, 64, 65]), min_size=250, max_size=300),
    ),
    rows=st.one_of(st.none(), st.integers(1, 16)),
    window=st.one_of(st.none(), st.integers(1, 1000)),
    split_tokens=st.sampled_from([None, 64, 512]),
    num_kv_heads=st.integers(1, 9),
    programs=st.integers(1, 40),
)
def test_any_batch_is_divided_as_the_model_says(interpreter: KernelWorker, **case: object) -> None:
    interpreter.run("plan_decode", case)


@pytest.mark.builds
def test_a_plan_is_one_launch_and_no_operation(compiler: KernelWorker) -> None:
    found = compiler.run("plan_launches", {})
    assert found["launches"] == 1
    assert {name.split(".")[1] for name in found["operations"]} <= {"empty", "unbind"}, found


def planned(lengths: list[int], **options: int | None) -> DecodePlan:
    return plan_decode_reference(torch.tensor(lengths, dtype=torch.int32), **{"num_kv_heads": 2, **options})


def test_grid_and_scratch_do_not_depend_on_the_batch() -> None:
    sizes = {
        (plan.num_programs, plan.num_slots)
        for plan in (planned([length] * batch) for batch in (1, 32, 256) for length in (1024, 131072))
    }
    assert len(sizes) == 1
    ((num_programs, num_slots),) = sizes
    assert num_slots == 2 * num_programs


@pytest.mark.parametrize(("split_tokens", "units"), [(None, [1, 1, 2, 2]), (128, [1, 1, 2, 1])])
def test_units_before_a_window_are_no_work(split_tokens: int | None, units: list[int]) -> None:
    plan = planned([5, 0, 130, 999], split_tokens=split_tokens, max_seq_len=999, window=60)
    assert plan.unit_starts.diff().tolist() == units


def test_a_window_begins_with_the_first_row() -> None:
    rows = torch.tensor([0, 1, 17], dtype=torch.int32)
    plan = plan_decode_reference(
        torch.tensor([192, 192], dtype=torch.int32), num_kv_heads=1, window=60, cu_query_lens=rows, max_query_len=16
    )
    assert plan.unit_starts.diff().tolist() == [1, 2]


@pytest.mark.parametrize("function", [plan_decode, plan_decode_reference])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"split_tokens": 0, "max_seq_len": 5}, "split_tokens"),
        ({"split_tokens": 100, "max_seq_len": 5}, "a multiple of 64"),
        ({"split_tokens": 64}, "max_seq_len"),
        ({"max_query_len": 17}, "max_query_len"),
        ({"cu_query_lens": torch.zeros(3, dtype=torch.int32)}, r"cu_query_lens: expected shape \(2\)"),
    ],
)
def test_arguments_are_checked(function: object, options: dict[str, int], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        function(torch.ones(1, dtype=torch.int32), **{"num_kv_heads": 2, **options})  # type: ignore[operator]


def test_compiled_kernel_refuses_host_tensors() -> None:
    with pytest.raises(KernelUnavailableError, match="plan_decode_reference"):
        plan_decode(torch.ones(1, dtype=torch.int32), num_kv_heads=1)
