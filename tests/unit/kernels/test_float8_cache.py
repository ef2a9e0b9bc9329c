"""A cache of float8: its write, decode and prefill against references that compute in float32."""

from __future__ import annotations

import pytest
import torch
from pagestream_kernels import KernelArgumentError, paged_decode_attention, paged_decode_attention_reference
from support.kernels import cases as kernel_cases
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise, sampled

COVER = pairwise(kernel_cases.FACTORS["float8_attention"])
WRITES = pairwise(kernel_cases.FACTORS["rope_and_quantise"])


@pytest.mark.builds
@pytest.mark.parametrize("case", sampled(COVER), ids=kernel_cases.case_id)
def test_kernel_matches_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("float8_attention", case)


@pytest.mark.builds
@pytest.mark.parametrize("case", sampled(WRITES), ids=kernel_cases.case_id)
def test_written_pages_match_reference(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("rope_and_quantise", case)


@pytest.mark.builds
@pytest.mark.parametrize("case", [{"operator": "decode"}, {"operator": "prefill"}], ids=kernel_cases.case_id)
def test_loop_copies_ahead_and_is_short(compiler: KernelWorker, case: Case) -> None:
    compiler.run("float8_loop", case)  # whose ceiling is checked there


def arguments(**changes: object) -> dict[str, object]:
    cache = torch.zeros(3, 64, 2, 64).to(torch.float8_e4m3fn)
    given = {
        "query": torch.randn(2, 4, 64),
        "key_cache": cache,
        "value_cache": cache,
        "block_tables": torch.tensor([[2, 1], [0, 1]], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 70], dtype=torch.int32),
        "key_scales": torch.ones(3, 2),
        "value_scales": torch.ones(3, 2),
    }
    return {**given, **changes}


@pytest.mark.parametrize("function", [paged_decode_attention, paged_decode_attention_reference])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"key_scales": None, "value_scales": None}, "key_cache: .*float32, got torch.float8_e4m3fn"),
        ({"value_scales": None}, "value_scales: expected a torch.Tensor"),
        ({"key_scales": torch.ones(3, 4)}, r"key_scales: expected shape \(3, 2\)"),
        ({"value_scales": torch.ones(2, 3).t()}, "value_scales: expected a contiguous tensor"),
        ({"key_cache": torch.zeros(3, 64, 2, 64)}, "key_cache: .*float8_e4m3fn, got torch.float32"),
    ],
)
def test_wrong_argument_is_named(function: object, changes: dict[str, object], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        function(**arguments(**changes), scale=1.0)


def test_small_blocks_are_refused() -> None:
    cache = torch.zeros(3, 16, 2, 64).to(torch.float8_e4m3fn)
    with pytest.raises(KernelArgumentError, match=r"block_size: expected one of \(64, 128, 256\).*got 16"):
        paged_decode_attention(**arguments(key_cache=cache, value_cache=cache), scale=1.0)
