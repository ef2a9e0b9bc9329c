"""Builds ahead of time, without a GPU: within the limits of each target, with main loops that copy ahead.

`make test` builds one case of each kind of kernel and keeps its result until a source changes; `make deep` has covers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.cache import ResultCache
from kernels.cases import case_id
from pagestream_kernels import KernelError
from pagestream_kernels.aot import TARGETS, Usage, check_usage, compile_variant
from pagestream_kernels.paged_decode import attend_variant
from pagestream_kernels.paged_prefill import prefill_variant
from pagestream_kernels.paging import Geometry, Options
from pagestream_kernels.silu_and_mul import silu_and_mul_variant
from pagestream_kernels.tables import load_table
from support.kernels.worker import KernelWorker
from support.pairwise import Case, pairwise

from kernels import builds

pytestmark = pytest.mark.builds

LLAMA = {"target": "sm_90", "head_dim": 128, "group_size": 4, "block_size": 64, "dtype": "bfloat16", "options": "none"}
ROPE = {"target": "sm_90", "head_dim": 128, "rotary": "half", "num_heads": 32, "norm": True, "interleaved": True}
CASES: Mapping[str, Case] = {
    "paged_decode": {**LLAMA, "schedule": "equal"},
    "paged_prefill": LLAMA,
    "rope_and_cache": {**ROPE, "target": "sm_80", "block_size": 16, "dtype": "float16"},
    "copy_blocks": {"target": "gfx942"},
    "rms_norm": {"target": "sm_100", "width": 4096, "dtype": "bfloat16", "residual": True},
    "silu_and_mul": {"target": "gfx942", "width": 2048, "dtype": "float16"},
    "filter_and_draw": {"target": "sm_90"},
    "fixed_order_matmul": {"target": "sm_90", "outputs": 4096, "inputs": 4096, "dtype": "bfloat16", "bias": True},
    "add_lora": {"target": "sm_90", "inputs": 4096, "parts": 3, "dtype": "bfloat16"},
}
ALL = [
    *(pytest.param(kernel, case, id=kernel) for kernel, case in CASES.items()),
    *(
        pytest.param(kernel, case, id=f"{kernel}-{case_id(case)}", marks=pytest.mark.slow)
        for kernel, factors in builds.FACTORS.items()
        for case in pairwise(factors)
    ),
]


@pytest.fixture(scope="module")
def build_cache() -> ResultCache:
    """Builds that passed with the present sources."""
    return ResultCache("compile")


@pytest.mark.parametrize(("kernel", "case"), ALL)
def test_kernel_compiles_within_the_targets_limits(
    request: pytest.FixtureRequest, build_cache: ResultCache, kernel: str, case: Case
) -> None:
    usages = build_cache.get(kernel, case)
    if usages is None:
        compiler: KernelWorker = request.getfixturevalue("compiler")  # started only when something is to compile
        usages = compiler.run(builds.build, kernel, case)
        build_cache.put(kernel, case, usages)
    for name, usage in usages.items():
        assert not builds.problems_of(name, Usage(**usage), case)
        assert usage["registers"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "changes"),
    [
        *((name, {}) for name in ("paged_decode", "paged_prefill", "rope_and_cache", "rms_norm", "silu_and_mul")),
        *(("paged_decode", {"head_dim": size, "block_size": 64}) for size in (40, 100, 125, 200)),
        *(("paged_prefill", {"head_dim": size, "dtype": "float32"}) for size in (40, 100, 125)),
        *(("paged_prefill", {"head_dim": size}) for size in (200, 250)),
    ],
)
def test_kernel_for_odd_strides_compiles_within_the_targets_limits(
    compiler: KernelWorker, operator: str, changes: dict[str, int | str]
) -> None:
    case = {name: values[1 % len(values)] for name, values in builds.FACTORS[operator].items()}
    usages = compiler.run(builds.build, operator, {**case, **changes, "target": "sm_90"}, False)
    assert all(usage["registers"] > 0 for usage in usages.values())


# -- main loops ---------------------------------------------------------------------------------------------------


def decode_loop(case: Case) -> dict[str, Any]:
    """Build decode's attention kernel, with another number of stages if the case has one, and check its loop."""
    variant = builds.variants_of("paged_decode", case)["attend"]
    variant = replace(variant, num_stages=case.get("num_stages", variant.num_stages))
    return asdict(builds.check_decode_loop(variant, case))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_decode_copies_a_page_ahead_in_a_short_loop(compiler: KernelWorker, target: str) -> None:
    loop = compiler.run(decode_loop, {**CASES["paged_decode"], "target": target})  # whose ceiling is checked there
    assert loop["buffers"] == 2
    assert loop["copies_in_flight"] == 2  # keys and values of the next tile
    assert loop["products"] == 32


@pytest.mark.slow
def test_decode_without_stages_fails_the_gate(compiler: KernelWorker) -> None:
    with pytest.raises(AssertionError, match="buffers=0"):
        compiler.run(decode_loop, {**CASES["paged_decode"], "num_stages": 1})


def matmul_loop(case: Case) -> dict[str, Any]:
    return asdict(builds.check_loop(builds.variants_of("fixed_order_matmul", case)["matmul"], case))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_a_product_copies_two_tiles_ahead(compiler: KernelWorker, target: str) -> None:
    for outputs in (4096, 28672):
        loop = compiler.run(matmul_loop, {**CASES["fixed_order_matmul"], "outputs": outputs, "target": target})
        assert loop["buffers"] >= 3
        assert loop["copies_in_flight"] >= 4  # inputs and weight of two tiles


FLOAT8_CEILINGS = {"decode": 487, "prefill": 582}
"""Instructions of a loop over a cache of float8 as cut for an H100, heads of 128: what builds gave, and 2 %."""


def float8_loop(operator: str) -> None:
    """Build attention over a cache of float8 for sm_90, and check what it needs and its loop."""
    geometry, options = Geometry(128, 4, 64, torch.bfloat16, has_scales=True), Options()
    table = load_table("h100")
    if operator == "decode":
        variant = attend_variant(geometry, "cuda", options, min_share=4, table=table, has_table_rows=True)
    else:
        variant = prefill_variant(geometry, "cuda", options, table=table, has_table_rows=True)
    problems = check_usage(compile_variant(variant, TARGETS["sm_90"]), TARGETS["sm_90"])
    assert not problems, problems
    loop = builds.check_loop(variant, {"target": "sm_90"})
    assert loop.instructions <= FLOAT8_CEILINGS[operator], loop


@pytest.mark.slow
@pytest.mark.parametrize("operator", FLOAT8_CEILINGS)
def test_a_loop_over_float8_copies_ahead_and_is_short(compiler: KernelWorker, operator: str) -> None:
    compiler.run(float8_loop, operator)


# -- limits and refusals ------------------------------------------------------------------------------------------


def test_limits_are_named() -> None:
    target = TARGETS["gfx942"]
    assert check_usage(Usage(shared_bytes=64 * 1024, registers=512, spill_bytes=0), target) == []
    shared, spills = check_usage(Usage(shared_bytes=64 * 1024 + 1, registers=512, spill_bytes=4), target)
    assert "65537" in shared
    assert "4 B" in spills


def test_a_variant_that_forgets_an_argument_is_refused() -> None:
    variant = silu_and_mul_variant(width=64, dtype=torch.float32)
    signature = {name: type_ for name, type_ in variant.signature.items() if name != "width"}
    broken = type(variant)(variant.kernel, signature, variant.constants, num_warps=4, num_stages=1)
    with pytest.raises(KernelError, match="width"):
        compile_variant(broken, TARGETS["sm_90"])


# -- kernels of an image -------------------------------------------------------------------------------------------

COMPILE = """
import sys
from pagestream_kernels import prebuild
from pagestream_kernels.aot import TARGETS

tokens, prebuild._SEQUENCES, prebuild._BLOCKS, prebuild._PREFILLS, head_dim = map(int, sys.argv[1:])
prebuild._TOKENS = tokens
shape = prebuild.ModelShape(256, 512, 4, 2, head_dim, has_bias=True, has_head_norm=True)
prebuild.compile_shapes([shape], [TARGETS["sm_90"]])
"""
TAKE = """
import sys
from pathlib import Path
from pagestream_kernels.prebuild import take_prebuilt

print(take_prebuilt(Path(sys.argv[1])))
"""


def run(program: str, cache: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_a_launch_finds_what_was_prebuilt(tmp_path: Path) -> None:
    prebuilt, cache = tmp_path / "prebuilt", tmp_path / "cache"
    run(COMPILE, prebuilt, "32", "16", "32", "4", "64")
    made = names(prebuilt)
    builds = Counter(path.stem for path in prebuilt.glob("*/*.cubin"))
    assert set(builds) == {
        "_rms_norm_kernel",
        "_rope_and_cache_kernel",
        "_prefill_kernel",
        "_plan_kernel",
        "_attend_kernel",
        "_merge_kernel",
        "_silu_and_mul_kernel",
        "_filter_and_draw_kernel",
        "_fixed_order_matmul_kernel",
    }
    assert builds["_plan_kernel"] == 3  # equal shares, fixed splits, and of several rows
    assert builds["_fixed_order_matmul_kernel"] >= 3  # few outputs and many, inputs of both sizes, a bias

    assert run(TAKE, cache, str(prebuilt)) == str(len(made))
    assert run(TAKE, cache, str(prebuilt)) == "0"
    shutil.rmtree(prebuilt)  # what was taken stands alone

    before = {path: path.stat().st_mtime_ns for path in cache.glob("*/*")}
    run(COMPILE, cache, "80", "48", "63", "3", "64")  # a launch with other counts, and parts off 16-byte borders
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*/*")} == before
    run(COMPILE, cache, "32", "16", "32", "4", "128")
    assert names(cache) > made, "another head size needs other kernels"
