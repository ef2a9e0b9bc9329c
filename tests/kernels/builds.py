"""Ahead-of-time builds of every kernel, one case at a time; a case is a plain dict, as in kernel_cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from kernels.cases import BLOCK_SIZES, DTYPES, GROUP_SIZES, HEAD_DIMS
from pagestream_kernels.aot import (
    TARGETS,
    MainLoop,
    Usage,
    check_usage,
    compile_variant,
    inspect_loop,
    loop_of,
    narrow_loads,
    usage_of,
)
from pagestream_kernels.copy_blocks import copy_blocks_variant
from pagestream_kernels.decode_plan import FIXED_SPLIT_TOKENS, MAX_QUERY_LEN, MIN_SHARE, TILE_TOKENS, plan_variant
from pagestream_kernels.filter_and_draw import filter_and_draw_variant
from pagestream_kernels.fixed_order_matmul import fixed_order_matmul_variant
from pagestream_kernels.int8_matmul import int8_matmul_variant
from pagestream_kernels.lora import expand_variant, shrink_variant
from pagestream_kernels.paged_decode import attend_variant, merge_variant
from pagestream_kernels.paged_prefill import prefill_variant
from pagestream_kernels.paging import MAX_ALIGNMENT, Geometry, Options
from pagestream_kernels.rms_norm import rms_norm_variant
from pagestream_kernels.rope_and_cache import rope_and_cache_variant
from pagestream_kernels.rope_and_quantise import rope_and_quantise_variant
from pagestream_kernels.runtime import Backend, Variant
from pagestream_kernels.silu_and_mul import silu_and_mul_variant
from pagestream_kernels.tuning import FLOAT8_TARGETS
from support.kernels.launched import Launched, launched
from support.pairwise import Case

OPTIONS = {
    "none": Options(),
    "window": Options(window=True),
    "slopes": Options(slopes=True),
    "all": Options(True, True, True),
}
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "equal": {"unit_tokens": TILE_TOKENS, "min_share": MIN_SHARE, "is_fixed": False},
    "rows": {"unit_tokens": TILE_TOKENS, "min_share": MIN_SHARE, "is_fixed": False, "has_lse": True},
    "fixed": {"unit_tokens": FIXED_SPLIT_TOKENS, "min_share": 1, "is_fixed": True, "has_lse": True},
}
"""How decode's work is divided; "rows": 16 query rows a sequence. With fixed splits a build serves any number."""
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
    "paged_decode": {**ATTENTION_FACTORS, "schedule": tuple(SCHEDULES)},
    "plan_decode": {
        "target": TARGET_NAMES,
        "schedule": tuple(SCHEDULES),
        "window": (False, True),
        "rows": (False, True),
    },
    "paged_prefill": ATTENTION_FACTORS,
    "rope_and_cache": {
        "target": TARGET_NAMES,
        "head_dim": HEAD_DIMS,
        "rotary": ("full", "half"),
        "block_size": BLOCK_SIZES,
        "dtype": tuple(DTYPES),
        "num_heads": (1, 12, 32),
        "norm": (False, True),
        "interleaved": (False, True),
    },
    "rope_and_quantise": {
        "target": FLOAT8_TARGETS,
        "head_dim": (64, 128),
        "rotary": ("full", "half"),
        "block_size": (64, 128),
        "dtype": tuple(DTYPES),
        "num_heads": (1, 32),
        "norm": (False, True),
        "interleaved": (False, True),
    },
    "float8_attention": {
        "target": FLOAT8_TARGETS,
        "operator": ("decode", "rows", "prefill"),
        "head_dim": (64, 128),
        "group_size": (1, 8),
        "block_size": (64, 128),
        "options": ("none", "all"),
    },
    "copy_blocks": {"target": TARGET_NAMES},
    "rms_norm": {
        "target": TARGET_NAMES,
        "width": (64, 80, 768, 4096, 8192, 16384),
        "dtype": tuple(DTYPES),
        "residual": (False, True),
    },
    "silu_and_mul": {"target": TARGET_NAMES, "width": (64, 2048, 14336), "dtype": tuple(DTYPES)},
    "filter_and_draw": {"target": TARGET_NAMES},
    "fixed_order_matmul": {
        "target": TARGET_NAMES,
        "outputs": (1000, 4096, 28672),
        "inputs": (1004, 4096, 14336),
        "dtype": tuple(DTYPES),
        "bias": (False, True),
    },
    "int8_matmul": {
        "target": TARGET_NAMES,
        "inputs": (1004, 4096),
        "group": (None, 128),
        "dtype": tuple(DTYPES),
        "bias": (False, True),
    },
    "add_lora": {
        "target": TARGET_NAMES,
        "inputs": (768, 1004, 4096, 14336),
        "parts": (1, 2, 3),
        "dtype": tuple(DTYPES),
    },
}


WIDE_STACK = 512
"""Bytes a thread that decode of several rows in float32, with heads of 256, may put on the stack."""
LOOP_CEILINGS: Mapping[tuple[str, int], int] = {
    ("sm_80", 64): 265,
    ("sm_80", 128): 345,
    ("sm_80", 256): 375,
    ("sm_90", 64): 255,
    ("sm_90", 128): 344,
    ("sm_90", 256): 350,
    ("sm_100", 64): 260,
    ("sm_100", 128): 340,
    ("sm_100", 256): 380,
}
"""Instructions for a tile of one page without options, by target and head size: what builds gave, and 2 %."""


def check_loop(variant: Variant, case: Case) -> MainLoop:
    """AssertionError unless a loop over tiles copies ahead and multiplies on tensor cores."""
    return check_found_loop(inspect_loop(variant, TARGETS[case["target"]]), case)


def check_found_loop(loop: MainLoop, case: Case) -> MainLoop:
    """AssertionError unless a loop that was found copies ahead and multiplies on tensor cores."""
    assert loop.buffers >= 2, loop
    assert loop.copies_in_flight > 0, loop
    assert loop.products > 0, loop
    return loop


def check_decode_loop(variant: Variant, case: Case) -> MainLoop:
    """AssertionError also where decode's loop is longer than it was."""
    return check_found_decode_loop(inspect_loop(variant, TARGETS[case["target"]]), case)


def check_found_decode_loop(loop: MainLoop, case: Case) -> MainLoop:
    """As `check_decode_loop`, of a loop that was found."""
    check_found_loop(loop, case)
    is_plain = case["options"] == "none" and case["schedule"] != "rows" and case["group_size"] <= 16
    if is_plain and case["block_size"] == TILE_TOKENS:
        ceiling = LOOP_CEILINGS.get((case["target"], case["head_dim"]), loop.instructions)
        assert loop.instructions <= ceiling, loop
    return loop


LOOP_CHECKS: Mapping[str, Callable[[MainLoop, Case], MainLoop]] = {
    "attend": check_found_decode_loop,
    "prefill": check_found_loop,
    "matmul": check_found_loop,
    "shrink": check_found_loop,
    "float8": check_found_loop,
}


VECTOR = 8
"""Elements of 16 bits that a load of 128 has. So many narrow loads are a vector that was missed; fewer are of a tile
that has not as many elements for a thread."""
NARROW: Mapping[str, Callable[[Case], bool]] = {
    "matmul": lambda case: bool(case.get("bias")),  # the bias, once a tile, as the products lie
    "rope_and": lambda case: bool(case["interleaved"]),  # neighbours, by two loads
    "expand": lambda _: True,  # where a module's outputs begin is read from a table
}
"""Launches on packed tensors that may load elements of 8 or 16 bits one by one, by the beginning of their name."""


def problems_of(name: str, usage: Usage, case: Case) -> list[str]:
    """What of a variant's needs is over the limits of its target, in words."""
    problems = check_usage(usage, TARGETS[case["target"]])
    is_wide = name == "attend" and case["dtype"] == "float32" and case["head_dim"] == 256
    if name == "exact" or (is_wide and case["schedule"] != "equal" and usage.spill_bytes <= WIDE_STACK):
        # It runs where a result is a NaN, or has both forms of the loop in float32: it may spill.
        problems = [problem for problem in problems if "stack" not in problem]
    return problems


def build(kernel: str, case: Case, is_packed: bool = True) -> dict[str, dict[str, Any]]:
    """Compile what one case of `kernel` launches; AssertionError when a limit of the target is passed.

    Args:
        is_packed: as launches on the tensors of a case have it; False: for odd strides, by the variants.

    Returns:
        What each variant needs, as JSON takes it.
    """
    target = TARGETS[case["target"]]
    usages = {}
    if not is_packed:
        for name, variant in variants_of(kernel, case).items():
            usages[name] = _checked(name, compile_variant(variant, target, is_packed=False), case)
        return usages
    for each in launched(kernel, case):
        name = name_of(kernel, each)
        usages[name] = _checked(name, usage_of(each.compiled, target), case)
        if not each.is_packed or case.get("dtype") == "float32":
            continue
        num_narrow = narrow_loads(each.compiled, target)
        if not any(applies(case) for loads, applies in NARROW.items() if name.startswith(loads)):
            assert num_narrow < VECTOR, (
                f"{name} for {target.name}: {num_narrow} loads of 8 or 16 bits, expected vectors"
            )
        if target.backend == "cuda" and name in LOOP_CHECKS:
            LOOP_CHECKS[name](loop_of(each.compiled), case)
    return usages


def _checked(name: str, usage: Usage, case: Case) -> dict[str, Any]:
    problems = problems_of(name, usage, case)
    assert not problems, f"{name} for {case['target']}: {'; '.join(problems)}; {usage}"
    return asdict(usage)


def name_of(kernel: str, launch: Launched) -> str:
    """Return the name of a launch among those of its case: that of `variants_of`."""
    name = launch.function.removeprefix("_").removesuffix("_kernel")
    if name == "prefill" and launch.variant.constants["IS_EXACT"]:
        return "exact"
    if kernel == "float8_attention" and name in ("attend", "prefill"):
        return "float8"
    if kernel in ("fixed_order_matmul", "int8_matmul"):
        name = "matmul"
    if name in ("matmul", "shrink") and not launch.is_packed:
        return f"{name} of unaligned rows"
    return name


def variants_of(kernel: str, case: Case) -> dict[str, Variant]:  # noqa: PLR0911 - one a kernel
    """What one case of `kernel` launches, by name."""
    if kernel == "filter_and_draw":
        return {"draw": filter_and_draw_variant()}
    if kernel == "copy_blocks":
        return {"copy": copy_blocks_variant()}
    if kernel == "plan_decode":
        cut = {name: SCHEDULES[case["schedule"]][name] for name in ("unit_tokens", "min_share")}
        return {"plan": plan_variant(**cut, has_window=case["window"], has_rows=case["rows"])}
    if kernel == "float8_attention":
        geometry = Geometry(case["head_dim"], case["group_size"], case["block_size"], torch.bfloat16, has_scales=True)
        options = OPTIONS[case["options"]]
        if case["operator"] == "prefill":
            build = partial(prefill_variant, geometry, "cuda", options, has_table_rows=True)
            return {"float8": build(), "exact": build(is_exact=True)}
        rows = MAX_QUERY_LEN if case["operator"] == "rows" else 1
        build = partial(attend_variant, geometry, "cuda", options, max_query_len=rows, min_share=MIN_SHARE)
        return {"float8": build(has_table_rows=True)}
    dtype: torch.dtype = DTYPES[case["dtype"]]
    backend = TARGETS[case["target"]].backend
    if kernel == "paged_decode":
        options = OPTIONS[case["options"]]
        schedule = SCHEDULES[case["schedule"]]
        max_query_len = MAX_QUERY_LEN if case["schedule"] == "rows" else 1
        return {
            "attend": attend_variant(
                _geometry(case), backend, options, max_query_len=max_query_len, has_table_rows=True, **schedule
            ),
            "merge": merge_variant(head_dim=case["head_dim"], dtype=dtype, options=options, **schedule),
        }
    if kernel == "paged_prefill":
        build = partial(prefill_variant, _geometry(case), backend, OPTIONS[case["options"]], has_table_rows=True)
        return {"prefill": build(), "exact": build(is_exact=True)}
    if kernel in ("rope_and_cache", "rope_and_quantise"):
        head_dim = case["head_dim"]
        rotary_dim = head_dim if case["rotary"] == "full" else head_dim // 2
        options = {name: case[name] for name in ("head_dim", "block_size", "num_heads", "interleaved")}
        variant = rope_and_cache_variant if kernel == "rope_and_cache" else rope_and_quantise_variant
        return {"rope": variant(rotary_dim=rotary_dim, dtype=dtype, has_norm=case["norm"], **options)}
    if kernel == "rms_norm":
        options = {"width": case["width"], "has_residual": case["residual"]}
        return {"norm": rms_norm_variant(dtype=dtype, backend=backend, **options)}
    return _variant_of_rows(kernel, case, dtype, backend)


def _variant_of_rows(kernel: str, case: Case, dtype: torch.dtype, backend: Backend) -> dict[str, Variant]:
    if kernel == "fixed_order_matmul":
        sizes = {"num_outputs": case["outputs"], "num_inputs": case["inputs"], "has_bias": case.get("bias", False)}
        name = "matmul" if case["inputs"] % MAX_ALIGNMENT == 0 else "matmul of unaligned rows"
        return {name: fixed_order_matmul_variant(dtype=dtype, backend=backend, **sizes)}
    if kernel == "int8_matmul":
        group_size = case["group"] or case["inputs"]
        sizes = {"num_inputs": case["inputs"], "group_size": group_size, "has_bias": case["bias"]}
        # Rows of bytes that do not begin at multiples of 16 are loaded in pieces.
        name = "matmul" if case["inputs"] % MAX_ALIGNMENT == 0 else "matmul of unaligned rows"
        return {name: int8_matmul_variant(dtype=dtype, backend=backend, **sizes)}
    if kernel == "add_lora":
        sizes = {"num_inputs": case["inputs"], "num_parts": case["parts"]}
        name = "shrink" if case["inputs"] % MAX_ALIGNMENT == 0 else "shrink of unaligned rows"
        return {name: shrink_variant(dtype=dtype, **sizes), "expand": expand_variant(dtype=dtype, **sizes)}
    return {"silu": silu_and_mul_variant(width=case["width"], dtype=dtype)}


def _geometry(case: Case) -> Geometry:
    alignment = math.gcd(MAX_ALIGNMENT, case["head_dim"])  # of a cache that holds nothing between its heads
    return Geometry(case["head_dim"], case["group_size"], case["block_size"], DTYPES[case["dtype"]], alignment)
