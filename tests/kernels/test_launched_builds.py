"""The gates read the code that a launch runs: builds from a variant's description are the same, bit for bit."""

from __future__ import annotations

import pytest
from pagestream_kernels.aot import TARGETS, _compile, narrow_loads
from support.kernels.launched import launched
from support.kernels.worker import KernelWorker
from support.pairwise import Case

from kernels import builds

pytestmark = pytest.mark.builds

QUICK: dict[str, Case] = {
    "rms_norm": {"width": 4096, "dtype": "bfloat16", "residual": True},
    "silu_and_mul": {"width": 2048, "dtype": "bfloat16"},
}
LARGER: dict[str, Case] = {
    "plan_decode": {"schedule": "equal", "window": False, "rows": False},
    "paged_decode": {
        "head_dim": 128,
        "group_size": 4,
        "block_size": 64,
        "dtype": "bfloat16",
        "options": "none",
        "schedule": "equal",
    },
    "paged_prefill": {"head_dim": 128, "group_size": 4, "block_size": 64, "dtype": "bfloat16", "options": "none"},
    "fixed_order_matmul": {"outputs": 4096, "inputs": 4096, "dtype": "bfloat16", "bias": False},
    "int8_matmul": {"inputs": 4096, "group": 128, "dtype": "bfloat16", "bias": False},
}


def compare(kernel: str, case: Case) -> list[str]:
    """Return the names of launches whose code is another one than that of their variants' builds."""
    target = TARGETS[case["target"]]
    kind = "cubin" if target.backend == "cuda" else "amdgcn"
    return [
        builds.name_of(kernel, each)
        for each in launched(kernel, case)
        if each.compiled.asm[kind] != _compile(each.variant, target, is_packed=each.is_packed).asm[kind]
    ]


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        *QUICK.items(),
        *(pytest.param(kernel, case, marks=pytest.mark.slow) for kernel, case in LARGER.items()),
    ],
    ids=[*QUICK, *LARGER],
)
def test_what_is_launched_is_what_a_variant_builds(compiler: KernelWorker, kernel: str, case: Case) -> None:
    assert compiler.run(compare, kernel, {"target": "sm_90", **case}) == []


def count_narrow_loads(case: Case) -> list[int]:
    """Of the launches of rows that are packed, and of rows that lie an odd number of elements apart."""
    return [narrow_loads(each.compiled, TARGETS[case["target"]]) for each in launched("silu_and_mul", case)]


def test_lost_vectors_are_counted(compiler: KernelWorker) -> None:
    """A width that is no multiple of 16 has nothing that could be loaded whole."""
    for target in ("sm_90", "gfx942"):
        case = {"target": target, "width": 2048, "dtype": "bfloat16"}
        assert compiler.run(count_narrow_loads, case) == [0]
        (count,) = compiler.run(count_narrow_loads, {**case, "width": 2047})
        assert count >= builds.VECTOR
