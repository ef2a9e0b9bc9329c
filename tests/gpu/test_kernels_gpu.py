"""The cases of the interpreter's tests, on a real GPU."""

from __future__ import annotations

import os

import pytest
import torch
from pagestream_kernels import paged_decode_attention, paged_decode_attention_reference, plan_decode
from pagestream_kernels.runtime import INTERPRETED
from support.pairwise import Case, pairwise

from kernels import cases as kernel_cases

pytestmark = pytest.mark.gpu

COVER = [(kernel, case) for kernel, factors in kernel_cases.FACTORS.items() for case in pairwise(factors)]


FIRST = dict(reversed(COVER))
"""A case of each kernel."""


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    if INTERPRETED:
        return torch.device("cpu")  # plays a GPU
    if not torch.cuda.is_available():
        reason = "torch finds no GPU"
        if "gpu" in os.environ.get("PAGESTREAM_REQUIRE", "").split(","):
            pytest.fail(f"{reason}, and PAGESTREAM_REQUIRE asks for one")
        pytest.skip(reason)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("kernel", FIRST)
def test_one_case_of_each_kernel(gpu: torch.device, kernel: str) -> None:
    kernel_cases.check(kernel, FIRST[kernel], str(gpu))


@pytest.mark.parametrize(("kernel", "case"), COVER, ids=[f"{k}-{kernel_cases.case_id(c)}" for k, c in COVER])
def test_kernel_matches_reference(gpu: torch.device, kernel: str, case: Case) -> None:
    kernel_cases.check(kernel, case, str(gpu))


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES)
def test_fixed_split_gives_the_same_bits_in_any_batch(gpu: torch.device, dtype: str) -> None:
    kernel_cases.check("decode_invariance", {"dtype": dtype}, str(gpu))


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES)
def test_a_linears_row_has_the_same_bits_among_any_number_of_others(gpu: torch.device, dtype: str) -> None:
    kernel_cases.check("matmul_invariance", {"dtype": dtype, "step": 1}, str(gpu))


def test_captured_graph_follows_new_lengths(gpu: torch.device) -> None:
    """The grid does not depend on lengths, so that one graph serves a growing sequence."""
    if gpu.type == "cpu":
        pytest.skip("a CPU captures nothing")
    case: Case = {
        "head_dim": 128,
        "group_size": 4,
        "block_size": 16,
        "dtype": "bfloat16",
        "layout": kernel_cases.LAYOUTS[0],
    }
    final_lengths = [3000, 17]
    cache = kernel_cases.make_cache(case, final_lengths, gpu)
    query, _, _ = kernel_cases.fused_rows(case, 2, gpu)
    seq_lens = torch.tensor([5, 1], dtype=torch.int32, device=gpu)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    arguments = (query, cache.key, cache.value, cache.tables, seq_lens)

    def step() -> None:
        plan = plan_decode(seq_lens, num_kv_heads=2)
        paged_decode_attention(*arguments, scale=0.1, out=out, plan=plan)

    side = torch.cuda.Stream(gpu)
    side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side):  # compile before the capture
        step()
    torch.cuda.current_stream(gpu).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([5, 1], [700, 16], final_lengths):
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        expected = paged_decode_attention_reference(*arguments, scale=0.1)
        kernel_cases.assert_close(out, expected, case)
