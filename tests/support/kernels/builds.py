"""Ahead-of-time builds of every kernel, one case at a time; a case is a plain dict, as in kernel_cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pagestream_kernels.aot import TARGETS, Usage, check_usage, compile_variant
from pagestream_kernels.filter_and_draw import filter_and_draw_variant
from pagestream_kernels.paged_decode import reduce_variant, split_variant
from pagestream_kernels.paged_prefill import prefill_variant
from pagestream_kernels.paging import Geometry, Options
from pagestream_kernels.rms_norm import rms_norm_variant
from pagestream_kernels.rope_and_cache import rope_and_cache_variant
from pagestream_kernels.runtime import Variant
from pagestream_kernels.silu_and_mul import silu_and_mul_variant
from support.kernels.cases import BLOCK_SIZES, DTYPES, GROUP_SIZES, HEAD_DIMS
from support.pairwise import Case

OPTIONS = {"none": Options(), "window": Options(window=True), "all": Options(True, True, True)}
TARGET_NAMES = ("sm_80", "sm_90", "sm_100", "gfx942")

ATTENTION_FACTORS: Mapping[str, Sequence[Any]] = {
    "target": TARGET_NAMES,
    "head_dim": HEAD_DIMS,
    "group_size": GROUP_SIZES,
    "block_size": BLOCK_SIZES,
    "dtype": tuple(DTYPES),
    "options": tuple(OPTIONS),
}
FACTORS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "paged_decode": ATTENTION_FACTORS,
    "paged_prefill": ATTENTION_FACTORS,
    "rope_and_cache": {
        "target": TARGET_NAMES,
        "head_dim": HEAD_DIMS,
        "rotary": ("full", "half"),
        "block_size": BLOCK_SIZES,
        "dtype": tuple(DTYPES),
        "num_heads": (1, 12, 32),
    },
    "rms_norm": {
        "target": TARGET_NAMES,
        "width": (64, 80, 768, 4096, 8192, 16384),
        "dtype": tuple(DTYPES),
        "residual": (False, True),
    },
    "silu_and_mul": {"target": TARGET_NAMES, "width": (64, 2048, 14336), "dtype": tuple(DTYPES)},
    "filter_and_draw": {"target": TARGET_NAMES},
}


def build(kernel: str, case: Case, *, is_packed: bool = True) -> dict[str, Usage]:
    """Compile what one case of `kernel` launches; AssertionError when a limit of the target is passed."""
    target = TARGETS[case["target"]]
    usages = {}
    for name, variant in _variants(kernel, case).items():
        usages[name] = compile_variant(variant, target, is_packed=is_packed)
        problems = check_usage(usages[name], target)
        assert not problems, f"{name} for {target.name}: {'; '.join(problems)}; {usages[name]}"
    return usages


def _variants(kernel: str, case: Case) -> dict[str, Variant]:
    if kernel == "filter_and_draw":
        return {"draw": filter_and_draw_variant()}
    dtype: torch.dtype = DTYPES[case["dtype"]]
    backend = TARGETS[case["target"]].backend
    if kernel == "paged_decode":
        return {
            "split": split_variant(_geometry(case), backend, OPTIONS[case["options"]]._replace(sinks=False)),
            "reduce": reduce_variant(head_dim=case["head_dim"], dtype=dtype, has_sinks=OPTIONS[case["options"]].sinks),
        }
    if kernel == "paged_prefill":
        return {"prefill": prefill_variant(_geometry(case), backend, OPTIONS[case["options"]])}
    if kernel == "rope_and_cache":
        head_dim = case["head_dim"]
        rotary_dim = head_dim if case["rotary"] == "full" else head_dim // 2
        options = {name: case[name] for name in ("head_dim", "block_size", "num_heads")}
        return {"rope": rope_and_cache_variant(rotary_dim=rotary_dim, dtype=dtype, **options)}
    if kernel == "rms_norm":
        options = {"width": case["width"], "has_residual": case["residual"]}
        return {"norm": rms_norm_variant(dtype=dtype, backend=backend, **options)}
    return {"silu": silu_and_mul_variant(width=case["width"], dtype=dtype)}


def _geometry(case: Case) -> Geometry:
    return Geometry(case["head_dim"], case["group_size"], case["block_size"], DTYPES[case["dtype"]])
