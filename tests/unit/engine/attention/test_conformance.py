"""Every backend attends as plain attention in float64 does, under every option, and reads nothing that it must not."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from pagestream_engine.native_build import find_compiler
from support.engines.attention_cases import (
    FACTORS,
    LENGTHS,
    Sequences,
    Span,
    check_case,
    make_backend,
    outputs_in_chunks,
)
from support.kernels.cases import case_id
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise, product, sampled

CPU = torch.device("cpu")
ON_CPU = ("torch", "deterministic torch", "native") if find_compiler() else ("torch", "deterministic torch")
EXACT = tuple(name for name in ON_CPU if name != "torch")
COVER = pairwise({"backend": ON_CPU, **FACTORS})
FEWER = {"head_dim": (16, 80), "block_size": (8, 32), "window": (None, 5, 37)}
TRITON = [{"backend": "triton", **case} for case in pairwise({**FACTORS, **FEWER})]
"""The interpreter takes half a minute for each. What the kernels do for each shape of a head, of a block and of a
window is tests/unit/kernels' to show."""
KEPT = [
    {**case, "cache": cache}
    for cache, factors in (("fp8", {**FACTORS, "head_dim": (80,)}), ("bfloat16", {**FACTORS, "head_dim": (16,)}))
    for case in pairwise({"backend": ON_CPU, **factors})
]
"""Caches of another dtype than the model's. A size of a head each: the C++ kernels are compiled for it."""
FLOAT8_TRITON = {"backend": "triton", "cache": "fp8", "dtype": "bfloat16", "head_dim": 16, "heads": (6, 2)}
OPTIONS = {"window": (None, 1, 20), "soft_cap": (None, 3.0), "sinks": (False, True)}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[KernelWorker]:
    """A process in which Triton interprets."""
    with KernelWorker("interpret") as worker:
        yield worker


@pytest.mark.parametrize("case", COVER, ids=case_id)
def test_attends_as_plain_attention_does(case: Case) -> None:
    check_case(case, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRITON, ids=case_id)
def test_triton_attends_as_plain_attention_does(interpreter: KernelWorker, case: Case) -> None:
    interpreter.run("backend", case)


@pytest.mark.parametrize("case", KEPT, ids=case_id)
def test_attends_to_a_cache_of_another_dtype(case: Case) -> None:
    check_case(case, CPU)


@pytest.mark.builds
@pytest.mark.slow
@pytest.mark.parametrize("rotation", sampled(["interleaved", None]))
def test_triton_attends_to_a_cache_of_float8(interpreter: KernelWorker, rotation: str | None) -> None:
    options = {"block_size": 64, "window": 37, "soft_cap": None, "sinks": True, "scale": None, "rotation": rotation}
    interpreter.run("backend", {**FLOAT8_TRITON, **options})


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("options", product(OPTIONS), ids=case_id)
def test_bits_of_a_deterministic_backend_depend_on_the_sequence_alone(name: str, options: Case) -> None:
    dtype = "float16" if options["sinks"] else "float32"
    case = {**options, "dtype": dtype, "head_dim": 32, "heads": (6, 2), "block_size": 8, "scale": None}
    seqs = Sequences({**case, "rotation": "neox"}, LENGTHS)
    backend = make_backend(name, [seqs.shape], CPU)
    assert backend.is_deterministic
    expected = outputs_in_chunks(seqs, backend, [0, 90])
    cut = outputs_in_chunks(seqs, backend, [0, 7, 8, 25, 41, 42, 43, 80, 90])
    for whole, parts in zip(expected, cut, strict=True):
        assert torch.equal(whole, parts)


@pytest.mark.parametrize("name", ON_CPU)
def test_groups_of_several_shapes_share_the_blocks(name: str) -> None:
    """Two layers with tables of their own, of which one takes a part of each page."""
    options = {"dtype": "float32", "scale": None, "soft_cap": None, "sinks": False, "rotation": "neox"}
    large_case = {**options, "head_dim": 32, "heads": (6, 2), "block_size": 8, "window": None}
    small_case = {**options, "head_dim": 16, "heads": (4, 1), "block_size": 16, "window": 20}
    pool = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    large = Sequences(large_case, LENGTHS, 0, pool)
    small = Sequences(small_case, LENGTHS, 1, pool)
    backend = make_backend(name, [large.shape, small.shape], CPU)
    backend.store.allocate(60)
    backend.store.cache.fill_(math.nan)
    spans: list[Span] = [(2, 0, 30), (3, 0, 70)]
    last: list[Span] = [(2, 30, 31), (3, 70, 71)]
    for step, num_prefills in ((spans, 2), (last, 0)):
        context = backend.prepare_step([seqs.batch(step, num_prefills) for seqs in (large, small)])
        for seqs in (large, small):
            for output, span in zip(seqs.attend(backend, context, step), step, strict=True):
                torch.testing.assert_close(output.double(), seqs.expected(span), atol=2e-5, rtol=2e-5)
