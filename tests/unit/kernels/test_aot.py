from __future__ import annotations

import pytest
import torch
from pagestream_kernels.aot import TARGETS, Usage, check_usage, compile_variant
from pagestream_kernels.errors import KernelError
from pagestream_kernels.silu_and_mul import silu_and_mul_variant
from support.kernels import builds as kernel_builds
from support.kernels import cases as kernel_cases
from support.kernels.cache import ResultCache
from support.kernels.worker import KernelWorker
from support.pairwise import pairwise, sampled

pytestmark = pytest.mark.builds

LLAMA = {
    "head_dim": 128,
    "group_size": 4,
    "block_size": 64,
    "dtype": "bfloat16",
    "options": "none",
    "schedule": "equal",
}
COVER = [(kernel, case) for kernel, factors in kernel_builds.FACTORS.items() for case in pairwise(factors)]


@pytest.mark.parametrize(("kernel", "case"), sampled(COVER), ids=[f"{k}-{kernel_cases.case_id(c)}" for k, c in COVER])
def test_kernel_compiles_within_the_targets_limits(
    request: pytest.FixtureRequest, build_cache: ResultCache, kernel: str, case: dict[str, object]
) -> None:
    usages = build_cache.get(kernel, case)
    if usages is None:
        compiler: KernelWorker = request.getfixturevalue("compiler")  # started only when something is to compile
        usages = compiler.run(kernel, case)
        build_cache.put(kernel, case, usages)
    for name, usage in usages.items():
        assert not kernel_builds.problems_of(name, Usage(**usage), case)
        assert usage["registers"] > 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_decode_copies_a_page_ahead_in_a_short_loop(compiler: KernelWorker, target: str) -> None:
    loop = compiler.run("decode_loop", {**LLAMA, "target": target})  # whose ceiling is checked there
    assert loop["buffers"] == 2
    assert loop["copies_in_flight"] == 2  # keys and values of the next tile
    assert loop["products"] == 32


def test_decode_without_stages_fails_the_gate(compiler: KernelWorker) -> None:
    with pytest.raises(AssertionError, match="buffers=0"):
        compiler.run("decode_loop", {**LLAMA, "target": "sm_90", "num_stages": 1})


def test_cover_has_every_value() -> None:
    for kernel, factors in kernel_builds.FACTORS.items():
        for name, values in factors.items():
            assert {case[name] for other, case in COVER if other == kernel} == set(values)


def test_limits_are_named() -> None:
    target = TARGETS["gfx942"]
    assert check_usage(Usage(shared_bytes=64 * 1024, registers=512, spill_bytes=0), target) == []
    shared, spills = check_usage(Usage(shared_bytes=64 * 1024 + 1, registers=512, spill_bytes=4), target)
    assert "65537" in shared
    assert "4 B" in spills


def test_interpreting_process_does_not_compile(interpreter: KernelWorker) -> None:
    interpreter.run("refuses_to_compile", {"dtype": "float32"})


def test_variant_that_forgets_an_argument_is_refused() -> None:
    variant = silu_and_mul_variant(width=64, dtype=torch.float32)
    signature = {name: type_ for name, type_ in variant.signature.items() if name != "width"}
    broken = type(variant)(variant.kernel, signature, variant.constants, num_warps=4, num_stages=1)
    with pytest.raises(KernelError, match="width"):
        compile_variant(broken, TARGETS["sm_90"])
