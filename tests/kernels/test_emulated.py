"""Kernels by their compiled code: the PTX that Triton makes for a GPU, launched by our launcher, executed by the host.

`make test` has a small case of each kernel, a model of two layers, and code with a barrier too few;
`make deep PARTS=emulated` runs all pairs of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from kernels.cache import ResultCache
from kernels.cases import LAYOUTS
from support.engines.tiny_models import make_model
from support.kernels.worker import KernelWorker
from support.pairwise import Case

from kernels import emulated as runs

pytestmark = pytest.mark.builds

_SHAPE = {"head_dim": 64, "group_size": 4, "block_size": 64, "dtype": "bfloat16", "layout": LAYOUTS[1]}
_PLAIN = {"window": None, "soft_cap": None, "sinks": False, "slopes": None}
DECODE: Case = {**_SHAPE, **_PLAIN, "lengths": "mixed", "rows": "1", "split_tokens": None, "tables": "resident"}
PREFILL: Case = {**_SHAPE, **_PLAIN, "chunks": "5", "tables": "own", "layout": LAYOUTS[2]}
"""Tokens are neighbours in memory: a stride of 1, which Triton makes a constant."""
NORM: Case = {"shape": (3, 4096), "dtype": "bfloat16", "residual": True, "strided": False}
MATMUL: Case = {"shape": (66, 130, 128), "dtype": "bfloat16", "bias": False, "strided": False}
CASES: Mapping[str, Case] = {
    "paged_decode": {**DECODE, "slopes": "exact"},
    "plan_decode": {"lengths": "borders", "rows": 16, "split_tokens": None, "window": 100, "num_kv_heads": 3},
    "paged_prefill": {**PREFILL, "slopes": "rounded"},
    "rope_and_cache": {
        **_SHAPE, "tokens": 5, "rotary": "half", "index": "int32", "angles": "same", "norm": True, "interleaved": True,
    },
    "rope_and_quantise": {
        "head_dim": 64, "group_size": 1, "block_size": 64, "dtype": "bfloat16", "rotary": "full", "norm": False,
        "interleaved": False,
    },
    "float8_attention": {
        **_PLAIN, "operator": "decode", "head_dim": 64, "group_size": 3, "block_size": 64, "dtype": "float16",
    },
    "copy_blocks": {"page": 1, "dtype": "float32", "pools": 1, "index": "int32"},
    "rms_norm": NORM,
    "silu_and_mul": {"shape": (2, 5, 1000), "dtype": "bfloat16", "strided": True},
    "filter_and_draw": {
        "shape": (5, 123), "top_k": True, "top_p": True, "min_p": True, "values": "tied", "strided": True,
    },
    "fixed_order_matmul": MATMUL,
    "int8_matmul": {"shape": (5, 123, 100), "group": None, "dtype": "bfloat16", "bias": True},
    "add_lora": {"shape": (75, (70, 16, 33)), "ranks": "8", "rows": "mixed", "dtype": "float16"},
}  # fmt: skip


@pytest.fixture(scope="module")
def passed() -> ResultCache:
    """Cases that passed with the present sources."""
    return ResultCache("emulate")


@pytest.mark.parametrize("kernel", CASES)
def test_compiled_code_gives_the_references_results(
    request: pytest.FixtureRequest, passed: ResultCache, kernel: str
) -> None:
    target = "sm_89" if kernel in runs.NEEDS_FLOAT8 else "sm_80"
    key = {"target": target, **CASES[kernel]}

    def run() -> None:
        compiler: KernelWorker = request.getfixturevalue("compiler")
        compiler.run(runs.check, target, kernel, CASES[kernel])

    passed.once(kernel, key, run)


# -- a model --------------------------------------------------------------------------------------------------------


NARROW = {"hidden_size": 64, "intermediate_size": 72, "num_attention_heads": 2, "num_key_value_heads": 1}


def check_model(
    compiler: KernelWorker, folder: Path, family: str, target: str, lengths: list[int], **options: Any
) -> None:
    model = str(make_model(folder / "model", family, num_hidden_layers=2, head_dim=64, **NARROW))
    options = {"block_size": 64, "max_num_batched_tokens": 96, **options}
    emulated = compiler.run(runs.generate, target, model, lengths, options, limit_s=500)
    assert emulated["launches"] > 10 * len(lengths)
    assert [len(tokens) for tokens in emulated["tokens"]] == [3] * len(lengths)
    assert emulated["tokens"] == compiler.run(runs.generate, None, model, lengths, options)["tokens"]


def test_a_model_of_two_layers_gives_torchs_tokens(compiler: KernelWorker, tmp_path: Path) -> None:
    check_model(compiler, tmp_path, "llama", "sm_80", [20], dtype="float16")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        {"dtype": "float32", "deterministic": True},
        {"dtype": "float16", "kv_cache_dtype": "fp8"},
    ],
    ids=("bfloat16", "float32", "deterministic", "fp8"),
)
def test_a_model_gives_torchs_tokens_by_each_kind_of_kernel(
    compiler: KernelWorker, tmp_path: Path, options: dict[str, Any]
) -> None:
    check_model(compiler, tmp_path, "qwen3", "sm_89", [3, 130, 70], **options)


# -- code that does wrong -------------------------------------------------------------------------------------------

SYNCHRONISATION = r"bar\.sync|cp\.async\.wait_group"


@dataclass(frozen=True)
class Synchronised:
    """A kernel's function with barriers and waits, of which some part nothing in a case."""

    kernel: str
    case: Case
    function: str
    count: int
    redundant: tuple[int, ...] = ()


def check_that_it_is_missed(compiler: KernelWorker, given: Synchronised) -> None:
    """Leave out each barrier and wait, one at a time."""
    found = compiler.run(
        runs.faults_without, "sm_80", given.kernel, given.case, given.function, SYNCHRONISATION, limit_s=500
    )
    assert [index for index, (_, fault) in enumerate(found) if not fault] == list(given.redundant), found
    assert any("race" in fault for _, fault in found)
    assert len(found) == given.count


@pytest.mark.parametrize(
    "given",
    [
        Synchronised("rms_norm", NORM, "_rms_norm_kernel", 2),
        # The two before the first copy part nothing.
        Synchronised("fixed_order_matmul", MATMUL, "_fixed_order_matmul_kernel", 8, redundant=(0, 1)),
    ],
    ids=("rms_norm", "fixed_order_matmul"),
)
def test_a_missing_barrier_or_wait_is_noticed(
    request: pytest.FixtureRequest, passed: ResultCache, given: Synchronised
) -> None:
    passed.once(
        "without synchronisation",
        asdict(given),
        lambda: check_that_it_is_missed(request.getfixturevalue("compiler"), given),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_missing_barrier_or_wait_of_attention_is_noticed(compiler: KernelWorker) -> None:
    case = {**PREFILL, "layout": LAYOUTS[1], "chunks": "prefix"}
    # Those that are left out unnoticed part nothing in these cases.
    check_that_it_is_missed(compiler, Synchronised("paged_prefill", case, "_prefill_kernel", 15, redundant=(0,)))
    check_that_it_is_missed(compiler, Synchronised("paged_decode", DECODE, "_attend_kernel", 16, redundant=(0, 2)))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (r"(st\.global\.v4\.b32 \[ %rd\d+ \+) 0", r"\1 8", "misaligned access of 16 bytes"),
        (r"(ld\.global\.v4\.b32 \{[^}]*\}, \[ %rd\d+ \+) 0", r"\1 65536", "are in no tensor of the launch"),
        (r"(st\.shared\.b32 \[ %r\d+ \+) 0", r"\1 4096", "bytes of shared memory"),
        (r"rsqrt\.approx", "sqrt.approx", "wrong"),
    ],
)
def test_an_access_that_goes_wrong_is_noticed(
    request: pytest.FixtureRequest, passed: ResultCache, old: str, new: str, fault: str
) -> None:
    def run() -> None:
        compiler: KernelWorker = request.getfixturevalue("compiler")
        assert fault in compiler.run(runs.fault_of_changed, "sm_80", "rms_norm", NORM, old, new)

    passed.once("wrong access", {**NORM, "old": old, "new": new, "fault": fault}, run)


def test_bits_do_not_depend_on_the_order_of_warps(request: pytest.FixtureRequest, passed: ResultCache) -> None:
    def run() -> None:
        compiler: KernelWorker = request.getfixturevalue("compiler")
        first, *others = compiler.run(runs.outputs_by_order, "sm_80", DECODE, [0, 1, 2])
        assert all(other == first for other in others)

    passed.once("order of warps", DECODE, run)
