"""Every kernel under Triton's interpreter: its reference's results, and bits that depend on a row alone.

`make test` has one case or two of each kernel, of odd shapes; `make deep` has covers of all pairs of values. What has
passed is remembered until a source changes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import pagestream_kernels as kernels
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels.cache import ResultCache
from kernels.cases import (
    FACTORS,
    LAYOUTS,
    case_id,
    check,
    fused_rows,
    make_cache,
    sampling_rows,
)
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise
from torch import Tensor

pytestmark = pytest.mark.builds

CPU = torch.device("cpu")
_OPTIONS = {"window": 40, "soft_cap": 2.0, "sinks": True, "slopes": "rounded"}
_PLAIN = {"window": None, "soft_cap": None, "sinks": False, "slopes": None}
_ODD = {"head_dim": 80, "group_size": 3, "block_size": 16, "dtype": "bfloat16", "layout": LAYOUTS[1]}
_EVEN = {"head_dim": 64, "group_size": 1, "block_size": 64, "dtype": "float32", "layout": LAYOUTS[0]}
_TURN = {"rotary": "half", "norm": True, "interleaved": True}
_WHOLE_TURN = {"rotary": "full", "norm": False, "interleaved": False}
CASES: Mapping[str, Sequence[Case]] = {
    "paged_decode": (
        {**_ODD, **_OPTIONS, "lengths": "mixed", "rows": "mixed", "split_tokens": None, "tables": "resident"},
        {**_EVEN, **_PLAIN, "lengths": "border", "rows": "1", "split_tokens": 64, "tables": "own"},
    ),
    "paged_prefill": (
        {**_ODD, **_OPTIONS, "chunks": "mixed", "tables": "resident"},
        {**_EVEN, **_PLAIN, "chunks": "prefix", "tables": "own"},
    ),
    "rope_and_cache": (
        {**_ODD, **_TURN, "tokens": 5, "index": "int32", "angles": "same"},
        {**_EVEN, **_WHOLE_TURN, "tokens": 5, "index": "int64", "angles": "float32"},
    ),
    "rope_and_quantise": ({**_TURN, "head_dim": 80, "group_size": 1, "block_size": 64, "dtype": "bfloat16"},),
    "float8_attention": (
        {**_OPTIONS, "operator": "rows", "head_dim": 72, "group_size": 3, "block_size": 64, "dtype": "bfloat16"},
        {**_PLAIN, "operator": "prefill", "head_dim": 64, "group_size": 1, "block_size": 64, "dtype": "float32"},
    ),
    "copy_blocks": (
        {"page": 10000, "dtype": "uint8", "pools": 2, "index": "int32"},
        {"page": 1, "dtype": "float32", "pools": 1, "index": "int64"},
    ),
    "rms_norm": (
        {"shape": (5, 123), "dtype": "bfloat16", "residual": True, "strided": True},
        {"shape": (7, 3, 80), "dtype": "float32", "residual": False, "strided": False},
        {"shape": (0, 64), "dtype": "float16", "residual": True, "strided": False},
    ),
    "silu_and_mul": (
        {"shape": (2, 5, 1000), "dtype": "bfloat16", "strided": True},
        {"shape": (0, 64), "dtype": "float32", "strided": False},
    ),
    "filter_and_draw": (
        {"shape": (5, 123), "top_k": True, "top_p": True, "min_p": True, "values": "tied", "strided": True},
        {"shape": (4, 5000), "top_k": False, "top_p": True, "min_p": False, "values": "infinite", "strided": False},
    ),
    "fixed_order_matmul": (
        {"shape": (5, 123, 100), "dtype": "bfloat16", "bias": True, "strided": True},
        {"shape": (66, 130, 128), "dtype": "float32", "bias": False, "strided": False},
    ),
    "int8_matmul": (
        {"shape": (5, 123, 100), "group": None, "dtype": "bfloat16", "bias": True},
        {"shape": (70, 40, 160), "group": 32, "dtype": "float32", "bias": False},
    ),
    "add_lora": ({"shape": (75, (70, 16, 33)), "ranks": "mixed", "rows": "mixed", "dtype": "bfloat16"},),
    "plan_decode": ({"lengths": "borders", "rows": 16, "split_tokens": None, "window": 100, "num_kv_heads": 3},),
}
ALL = [
    *(
        pytest.param(kernel, case, id=f"{kernel}-odd{place}")
        for kernel, cases in CASES.items()
        for place, case in enumerate(cases)
    ),
    *(
        pytest.param(kernel, case, id=f"{kernel}-{case_id(case)}", marks=pytest.mark.slow)
        for kernel, factors in FACTORS.items()
        for case in pairwise(factors)
    ),
]


Run = Callable[..., None]
"""(function of this file or of `cases`, its arguments): call it under the interpreter."""


@pytest.fixture(scope="module")
def passed() -> ResultCache:
    """Cases that passed with the present sources."""
    return ResultCache("interpret")


@pytest.fixture
def interpret(request: pytest.FixtureRequest, passed: ResultCache) -> Run:
    """Call what has not passed with the present sources."""

    def run(function: Callable[..., object], *arguments: Any) -> None:
        def call() -> None:
            interpreter: KernelWorker = request.getfixturevalue("interpreter")
            interpreter.run(function, *arguments)

        # A kernel's case has the name that it has in `make kernels`.
        name, case = arguments if function is check else (function.__name__, {"arguments": arguments})
        passed.once(name, case, call)

    return run


@pytest.mark.parametrize(("kernel", "case"), ALL)
def test_kernel_matches_reference(interpret: Run, kernel: str, case: Case) -> None:
    interpret(check, kernel, case)


@settings(max_examples=20)
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
    interpreter.run(check, "plan_decode", case)


# -- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": "float16", "block_size": 64, "window": 70},
        pytest.param({"dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "block_size": 128}, marks=pytest.mark.slow),
    ],
    ids=case_id,
)
def test_fixed_splits_give_a_row_the_same_bits_in_any_batch(interpret: Run, case: Case) -> None:
    interpret(check, "decode_invariance", case)


def prefill_invariance(case: Case) -> None:
    """A token's bits do not depend on where its prompt is cut into chunks, nor on the chunks beside it."""
    case = {"head_dim": 64, "group_size": 2, "layout": LAYOUTS[0], **case}
    cache = make_cache(case, [80, 50], CPU)
    query, _, _ = fused_rows(case, 130, CPU)
    sinks = torch.randn(query.shape[1])

    def attend(chunks: list[tuple[int, int, int]]) -> Tensor:
        """Attend with chunks (sequence, first token, end)."""
        counts = [end - begin for _, begin, end in chunks]
        return kernels.paged_prefill_attention(
            torch.cat([query[80 * seq + begin : 80 * seq + end] for seq, begin, end in chunks]),
            cache.key,
            cache.value,
            cache.tables[[seq for seq, _, _ in chunks]],
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            torch.tensor([end for _, _, end in chunks], dtype=torch.int32),
            scale=0.125,
            window=case["window"],
            sinks=sinks,
        )

    whole = attend([(0, 0, 80)])
    parts = attend([(0, 0, 27)]), attend([(1, 33, 50), (0, 27, 66)])[17:], attend([(0, 66, 80)])
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": "bfloat16", "block_size": 16, "window": 45},
        pytest.param({"dtype": "float16", "block_size": 64, "window": None}, marks=pytest.mark.slow),
    ],
    ids=case_id,
)
def test_chunks_give_a_token_the_same_bits(interpret: Run, case: Case) -> None:
    interpret(prefill_invariance, case)


@pytest.mark.parametrize(
    "dtype", ["float16", *(pytest.param(d, marks=pytest.mark.slow) for d in ("float32", "bfloat16"))]
)
def test_a_linears_row_has_the_same_bits_among_any_number_of_others(interpret: Run, dtype: str) -> None:
    interpret(check, "matmul_invariance", {"dtype": dtype, "step": 29})


# -- what a kernel must not read, and must read once --------------------------------------------------------------


def infinite_values(operator: str, dtype: str, window: int | None, given: str) -> None:
    """A value that is not finite reaches the rows that see it and no others, whose bits it leaves alone."""
    case = {"head_dim": 64, "group_size": 2, "block_size": 64, "layout": LAYOUTS[0], "dtype": dtype}
    num_tokens, at, value = 40, 23, float(given)
    cache = make_cache(case, [num_tokens], CPU)
    query, _, _ = fused_rows(case, num_tokens, CPU)
    first = num_tokens - 16 if operator == "decode" else 0

    def attend() -> Tensor:
        count = num_tokens - first
        lengths = torch.tensor([num_tokens], dtype=torch.int32)
        starts = torch.tensor([0, count], dtype=torch.int32)
        options = {"scale": 0.125, "window": window}
        arguments = (query[first:], cache.key, cache.value, cache.tables)
        if operator == "decode":
            return kernels.paged_decode_attention(
                *arguments, lengths, **options, cu_query_lens=starts, max_query_len=count
            )
        return kernels.paged_prefill_attention(*arguments, starts, lengths, **options)

    before = attend()
    sees = [token >= at and (window is None or token < at + window) for token in range(num_tokens)]
    reached = torch.zeros(before.shape, dtype=torch.bool)
    reached[torch.tensor(sees[first:]), 2:, 7] = True
    cache.value[cache.tables[0, 0].long(), at, 1, 7] = value
    after = attend()
    assert torch.equal(after[~reached], before[~reached])
    expected = torch.full_like(after[reached], value)
    assert torch.equal(after[reached].nan_to_num(nan=1.5), expected.nan_to_num(nan=1.5))
    assert reached.any()


@pytest.mark.parametrize(
    ("operator", "dtype", "window", "value"),
    [
        ("prefill", "bfloat16", 5, "-inf"),
        ("decode", "float16", None, "inf"),
        pytest.param("prefill", "float32", None, "inf", marks=pytest.mark.slow),
        pytest.param("prefill", "float16", None, "nan", marks=pytest.mark.slow),
        pytest.param("decode", "bfloat16", 5, "nan", marks=pytest.mark.slow),
    ],
)
def test_a_value_that_is_not_finite_reaches_only_who_sees_it(
    interpret: Run, operator: str, dtype: str, window: int | None, value: str
) -> None:
    interpret(infinite_values, operator, dtype, window, value)


def prefill_tiles(num_seqs: int) -> None:
    """Every row of every chunk is in one tile of the list, whose launch has no more than a program a chunk without."""
    chunks = [(int(cached), int(new)) for cached, new in torch.randint(0, 200, (num_seqs, 2))]
    chunks[-1] = (chunks[-1][0], 0)
    starts = torch.tensor([0, *accumulate(new for _, new in chunks)], dtype=torch.int32)
    seq_lens = torch.tensor([cached + new for cached, new in chunks], dtype=torch.int32)
    query = torch.zeros(int(starts[-1]), 6, 64, dtype=torch.float16)
    cache = torch.zeros(1, 64, 2, 64, dtype=torch.float16)
    plan = kernels.plan_prefill(query, cache, cache, starts, seq_lens)
    listed = [(seq, row) for seq, row in zip(plan.tile_seqs.tolist(), plan.tile_rows.tolist(), strict=True) if seq >= 0]
    wanted = {(seq, row) for seq, (_, new) in enumerate(chunks) for row in range(0, 3 * new, plan.rows_per_tile)}
    assert set(listed) == wanted
    assert len(listed) == len(wanted)
    assert len(plan.tile_seqs) - len(listed) <= len(chunks)
    ends = [seq_lens[seq] - max(0, chunks[seq][1] - (row + plan.rows_per_tile) // 3) for seq, row in listed]
    assert ends == sorted(ends, reverse=True)


def test_every_row_of_a_prefill_is_in_one_tile(interpret: Run) -> None:
    for num_seqs in (1, 9):
        interpret(prefill_tiles, num_seqs)


def decode_shares(num_seqs: int, split_tokens: int | None) -> None:
    """Every sequence, KV head and tile is read exactly once: with equal scores a result counts its tokens by tile."""
    tile, most = 64, 6
    lengths = [int(length) for length in torch.randint(0, tile * most + 1, (num_seqs,))]
    blocks = torch.arange(len(lengths) * most, dtype=torch.int32).view(len(lengths), most)
    keys = torch.zeros(blocks.numel(), tile, 3, 16)
    values = torch.eye(most, 16).repeat(len(lengths), 1)[:, None, None].expand(keys.shape)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    plan = None
    if split_tokens is not None:
        plan = kernels.plan_decode(seq_lens, num_kv_heads=3, split_tokens=split_tokens, max_seq_len=tile * most)
    query = torch.randn(len(lengths), 3, 16)
    out = kernels.paged_decode_attention(query, keys, values, blocks, seq_lens, scale=1.0, plan=plan)
    read = (seq_lens[:, None] - torch.arange(16) * tile).clamp(0, tile)
    expected = (read / seq_lens[:, None].clamp(min=1))[:, None].expand(-1, 3, -1)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("split_tokens", [None, 128])
@pytest.mark.parametrize("num_seqs", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 7, 20))])
def test_every_tile_is_read_once(interpret: Run, num_seqs: int, split_tokens: int | None) -> None:
    interpret(decode_shares, num_seqs, split_tokens)


def wrong_plan() -> None:
    case = {"head_dim": 64, "group_size": 1, "block_size": 16, "layout": LAYOUTS[0], "dtype": "float32"}
    cache = make_cache(case, [5, 5], CPU)
    query, _, _ = fused_rows(case, 2, CPU)
    seq_lens = torch.tensor([5, 5], dtype=torch.int32)
    plan = kernels.plan_decode(seq_lens[:1], num_kv_heads=2)
    with pytest.raises(kernels.KernelArgumentError, match=r"plan\.unit_starts"):
        kernels.paged_decode_attention(query, cache.key, cache.value, cache.tables, seq_lens, scale=1.0, plan=plan)


def test_a_plan_of_another_batch_is_refused(interpret: Run) -> None:
    interpret(wrong_plan)


def draws_of_nothing() -> None:
    """A row that has a NaN or nothing to choose from says so, and leaves its neighbours alone."""
    options = {"shape": (4, 300), "strided": False, "values": "normal", "top_k": True, "top_p": True, "min_p": True}
    logits, columns = sampling_rows(options)
    logits[0, 7] = torch.nan
    logits[2] = -torch.inf
    token_ids, values = kernels.filter_and_draw(logits, **columns)
    assert values.isnan().tolist() == [True, False, False, False]
    assert (values == -torch.inf).tolist() == [False, False, True, False]
    assert all(0 <= token_id < 300 for token_id in token_ids.tolist())
    expected, _ = kernels.filter_and_draw_reference(logits, **columns)
    assert token_ids[1::2].tolist() == expected[1::2].tolist()


def test_a_row_without_a_token_is_marked_alone(interpret: Run) -> None:
    interpret(draws_of_nothing)


def many_draws(num_rows: int) -> None:
    logits = (torch.randn(4, 40) * 2).repeat(num_rows // 4, 1)
    columns: dict[str, Any] = {
        "temperatures": torch.full((num_rows,), 0.8),
        "seeds": torch.arange(num_rows) * 977,
        "positions": torch.arange(num_rows) % 50,
        "top_k": torch.tensor([20, 40]).repeat(num_rows // 2),
        "top_p": torch.tensor([0.9, 0.6, 1.0, 0.99]).repeat(num_rows // 4),
    }
    token_ids, _ = kernels.filter_and_draw(logits, **columns)
    assert token_ids.tolist() == kernels.filter_and_draw_reference(logits, **columns)[0].tolist()
    assert len(token_ids.unique()) > 15


@pytest.mark.slow
def test_many_draws(interpreter: KernelWorker) -> None:
    interpreter.run(many_draws, 120)


# -- what else runs kernels ----------------------------------------------------------------------------------------

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks" / "kernels"


def run_benchmark(kernel: str) -> None:
    """Run the benchmarks' smallest workloads: no other test would notice that they are broken."""
    sys.path.insert(0, str(BENCHMARKS))
    workloads = list(import_module(f"bench_{kernel}").workloads(CPU, smoke=True))
    assert workloads
    for workload in workloads:
        assert workload.num_bytes > 0
        workload.run()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")))
def test_benchmark_runs_its_smallest_workload(interpreter: KernelWorker, kernel: str) -> None:
    interpreter.run(run_benchmark, kernel)


def fastest_row(operator: str) -> None:
    """The times of an operator's candidates are of launches that are cut as they say; the least time wins."""
    from pagestream_kernels.launcher import recorded_launches
    from pagestream_kernels.tables import Row, RowKey
    from pagestream_kernels.tuning import Sizes, fastest

    candidates = [Row(16, tokens, 4, 1) for tokens in (16, 32, 64)]
    times, cuts = iter((3.0, 1.0, 2.0)), []

    def measure(run: Callable[[], object]) -> float:
        with recorded_launches() as keys:
            run()
        cuts.extend({dict(constants)["BLOCK_KV"] for _, constants, _ in keys if "BLOCK_KV" in dict(constants)})
        return next(times)

    key = RowKey(operator, "float16", 64, 16, 16)
    assert fastest(key, candidates, CPU, measure, Sizes(1, 20, 20)) == candidates[1]
    assert cuts == [16, 32, 64]


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["paged_decode", "paged_prefill"])
def test_the_fastest_candidate_is_chosen(interpreter: KernelWorker, operator: str) -> None:
    interpreter.run(fastest_row, operator)


def compile_one() -> None:
    from pagestream_kernels.aot import TARGETS, compile_variant
    from pagestream_kernels.silu_and_mul import silu_and_mul_variant

    with pytest.raises(kernels.KernelUnavailableError, match="TRITON_INTERPRET"):
        compile_variant(silu_and_mul_variant(width=64, dtype=torch.float32), TARGETS["sm_90"])


def test_an_interpreting_process_does_not_compile(interpreter: KernelWorker) -> None:
    interpreter.run(compile_one)


def multiply(count: int) -> int:
    return 2 * count


def test_the_worker_outlives_what_fails_in_it(interpreter: KernelWorker) -> None:
    with pytest.raises(AssertionError, match=r"(?s)check .*silu_and_mul.*float31.*Traceback.*KeyError"):
        interpreter.run(check, "silu_and_mul", {"shape": [1, 64], "dtype": "float31", "strided": False})
    assert interpreter.run(multiply, 6) == 12
    os.kill(interpreter.pid, signal.SIGSTOP)
    with pytest.raises(AssertionError, match=r"gave no answer in 0\.1 s and was killed"):
        interpreter.run(multiply, 2, limit_s=0.1)
    assert interpreter.run(multiply, 3) == 6
