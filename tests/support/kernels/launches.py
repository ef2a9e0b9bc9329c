"""The keys under which Triton looks for compiled kernels, without a GPU and without compiling.

A launch whose key is new compiles, and everything waits for it. The keys of a model's kernels must not depend on which
part of a tensor a step passes, or on how many rows it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import pagestream_kernels as kernels
import torch
from pagestream_kernels.aot import TARGETS, check_usage, compile_variant
from pagestream_kernels.decode.attend import attend_variant
from pagestream_kernels.launcher import compilations
from pagestream_kernels.paging import Geometry, Options
from pagestream_kernels.prebuild import AbsentGPU
from pagestream_kernels.prefill.attend import prefill_variant
from pagestream_kernels.runtime import Variant, compiling_only, triton
from pagestream_kernels.tables.rows import load_table
from support.kernels import builds
from support.kernels.stand_in_driver import StandInDriver
from support.kernels.wide import spread
from support.pairwise import Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PARTS = ((0, 1), (0, 2), (1, 1), (1, 3), (2, 16), (3, 17), (5, 32), (7, 33), (16, 48))
"""(first row, rows) of what a step passes."""
NUM_ROWS = 64
BLOCKS = 4
HEADS, KV_HEADS = 4, 2

Keys = dict[str, set[str]]


@contextmanager
def recorded() -> Iterator[Keys]:
    """Within the block launches compile nothing; gives their keys by the kernel's name."""
    keys: Keys = {}

    def record(*, key: Any, fn: Any, **_: Any) -> bool:
        keys.setdefault(fn.name, set()).add(str(key))
        return True  # "it is compiled already"

    triton.runtime.driver.set_active(AbsentGPU(TARGETS["sm_90"], 0))
    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, record
    try:
        with compiling_only():
            yield keys
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def count_keys(case: Case) -> dict[str, int]:
    """Launch one operator over all parts of its tensors; returns the number of keys of each of its kernels."""
    with recorded() as keys:
        LAUNCHES[case["operator"]](case["size"], torch.float16)
    return {name: len(found) for name, found in keys.items()}


def key_of(case: Case) -> dict[str, str]:
    """The key of `silu_and_mul` on two rows that lie `stride` elements apart."""
    with recorded() as keys:
        kernels.silu_and_mul(spread(torch.zeros(2, 128), 0, stride=case["stride"]))
    (key,) = keys["_silu_and_mul_kernel"]
    return {"key": key}


def compare_driver_calls(case: Case) -> dict[str, Any]:
    """Launch one operator over all parts of its tensors, each by Triton's `run` and by our launcher. Returns how many
    launches gave the driver the same, how many there were, and how many of ours went through Triton."""
    return _compare_driver_calls(lambda: LAUNCHES[case["operator"]](case["size"], torch.float16))


def compare_mixed_driver_calls(_: Case) -> dict[str, Any]:
    """Do the same for `silu_and_mul` on rows that need different kernels, one after the other, twice over."""

    def launch() -> None:
        for dtype in (torch.float16, torch.bfloat16):
            for stride in (192, 2**31, 193):
                kernels.silu_and_mul(spread(torch.zeros(2, 192, dtype=dtype), 0, stride=stride))
            kernels.silu_and_mul(torch.zeros(2, 384, dtype=dtype))
            # The alignment of a weight counts: steps pass all of it, always.
            kernels.rms_norm(torch.zeros(2, 192, dtype=dtype), torch.zeros(192, dtype=dtype), eps=1e-5)
            kernels.rms_norm(torch.zeros(2, 192, dtype=dtype), torch.zeros(193, dtype=dtype)[1:], eps=1e-5)

    return _compare_driver_calls(lambda: (launch(), launch()))


def _compare_driver_calls(call_operators: Callable[[], object]) -> dict[str, Any]:
    launches: list[tuple[Variant, tuple[int, ...], Mapping[str, Any]]] = []
    with compiling_only(), patch.object(Variant, "launch", lambda *launch: launches.append(launch)):
        call_operators()
    calls: list[Sequence[Any]] = []
    triton.runtime.driver.set_active(StandInDriver(TARGETS["sm_90"], lambda *call: calls.append(call)))
    num_equal, before = 0, compilations.count
    for variant, grid, arguments in launches:
        function, _ = variant.kernel.choose(arguments)
        variant.launch(grid, arguments)
        function[grid](**arguments, **variant.constants, num_warps=variant.num_warps, num_stages=variant.num_stages)
        ours, theirs = map(_driver_call, calls[-2:])
        num_equal += ours == theirs
    return {"equal": num_equal, "launches": len(launches), "through_triton": compilations.count - before}


def _driver_call(call: Sequence[Any]) -> tuple[Any, ...]:
    """Grid, stream, function and arguments, with tensors as their addresses; what is dropped describes the launch for
    profilers."""
    values = (value.data_ptr() if isinstance(value, Tensor) else value for value in call[-1])
    return (*call[:5], call[7], *values)


def _attention_rows(head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = torch.zeros(NUM_ROWS, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
    cache = torch.zeros(2, BLOCKS, KV_HEADS, 16, head_dim, dtype=dtype).transpose(2, 3)
    return (*rows.split((HEADS, KV_HEADS, KV_HEADS), dim=1), cache)


def _decode(head_dim: int, dtype: torch.dtype) -> None:
    query, _, _, cache = _attention_rows(head_dim, dtype)
    out = torch.zeros(NUM_ROWS, HEADS, head_dim, dtype=dtype)
    lengths = torch.ones(NUM_ROWS, dtype=torch.int32)
    for first, count in PARTS:
        part = slice(first, first + count)
        for width in (1, 5, 16):
            tables = torch.zeros(NUM_ROWS, width, dtype=torch.int32)[part]
            kernels.paged_decode_attention(
                query[part], cache[0], cache[1], tables, lengths[part], scale=0.1, out=out[part]
            )


def _plan(window: int, dtype: torch.dtype) -> None:
    lengths = torch.ones(NUM_ROWS, dtype=torch.int32)
    for first, count in PARTS:
        kernels.plan_decode(lengths[first : first + count], num_kv_heads=KV_HEADS, window=window)


def _prefill(head_dim: int, dtype: torch.dtype) -> None:
    query, _, _, cache = _attention_rows(head_dim, dtype)
    out = torch.zeros(NUM_ROWS, HEADS, head_dim, dtype=dtype)
    lengths = torch.ones(NUM_ROWS, dtype=torch.int32)
    for first, count in PARTS:
        part = slice(first, first + count)
        for width in (1, 5, 16):
            tables = torch.zeros(NUM_ROWS, width, dtype=torch.int32)[part]
            starts = torch.zeros(NUM_ROWS + 1, dtype=torch.int32)[first : first + count + 1]
            kernels.paged_prefill_attention(
                query[part],
                cache[0],
                cache[1],
                tables,
                starts,
                lengths[part],
                scale=0.1,
                out=out[part],
            )


def _rope(head_dim: int, dtype: torch.dtype) -> None:
    query, key, value, cache = _attention_rows(head_dim, dtype)
    positions, slots = torch.zeros(2, NUM_ROWS, dtype=torch.int64)
    for first, count in PARTS:
        part = slice(first, first + count)
        cos_sin = torch.zeros(64, head_dim)
        kernels.rope_and_cache(
            query[part], key[part], value[part], cos_sin, positions[part], cache[0], cache[1], slots[part]
        )


def _norm(width: int, dtype: torch.dtype) -> None:
    x, residual, out = torch.zeros(3, NUM_ROWS, width, dtype=dtype)
    weight = torch.zeros(width, dtype=dtype)
    for first, count in PARTS:
        part = slice(first, first + count)
        kernels.rms_norm(x[part], weight, eps=1e-5, residual=residual[part], out=out[part])


def _head_norm(width: int, dtype: torch.dtype) -> None:
    """Norms of queries, which are parts of one product's rows."""
    query, _, _, _ = _attention_rows(width, dtype)
    weight = torch.zeros(width, dtype=dtype)
    for first, count in PARTS:
        kernels.rms_norm(query[first : first + count], weight, eps=1e-5)


def _silu(width: int, dtype: torch.dtype) -> None:
    gate_up = torch.zeros(NUM_ROWS, 2 * width, dtype=dtype)
    out = torch.zeros(NUM_ROWS, width, dtype=dtype)
    for first, count in PARTS:
        part = slice(first, first + count)
        kernels.silu_and_mul(gate_up[part], out=out[part])


def _draw(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(NUM_ROWS, vocab_size)
    ones = torch.ones(NUM_ROWS)
    integers = torch.ones(NUM_ROWS, dtype=torch.int64)
    for first, count in PARTS:
        part = slice(first, first + count)
        given: tuple[Tensor, ...] = (logits[part], ones[part], integers[part], integers[part])
        kernels.filter_and_draw(*given)
        kernels.filter_and_draw(*given, top_k=integers[part], top_p=ones[part], min_p=ones[part])


def _matmul(num_inputs: int, dtype: torch.dtype) -> None:
    x, weight = torch.zeros(NUM_ROWS, num_inputs, dtype=dtype), torch.zeros(200, num_inputs, dtype=dtype)
    for first, count in PARTS:
        kernels.fixed_order_matmul(x[first : first + count], weight)


def _int8(num_inputs: int, dtype: torch.dtype) -> None:
    x, values = torch.zeros(NUM_ROWS, num_inputs, dtype=dtype), torch.zeros(200, num_inputs, dtype=torch.int8)
    for first, count in PARTS:
        kernels.int8_matmul(x[first : first + count], values, torch.ones(1, 200), num_inputs)


def _lora(num_inputs: int, dtype: torch.dtype) -> None:
    x, y = torch.zeros(NUM_ROWS, num_inputs, dtype=dtype), torch.zeros(NUM_ROWS, 200, dtype=dtype)
    for rank in (8, 100):
        table = kernels.LoraTable([(0, 200)], num_inputs, 1, dtype, x.device)
        matrices = torch.zeros(rank, num_inputs, dtype=dtype), torch.zeros(rank, 200, dtype=dtype)
        table.put(0, [kernels.LoraMatrices(*matrices, 1.0)])
        for first, count in PARTS:
            tiles = kernels.cut_tiles(torch.arange(count), [0, count], [0], rank)
            kernels.add_lora(y[first : first + count], x[first : first + count], table, tiles)


LAUNCHES: Mapping[str, Callable[[int, torch.dtype], None]] = {
    "paged_decode": _decode,
    "plan_decode": _plan,
    "paged_prefill": _prefill,
    "rope_and_cache": _rope,
    "rms_norm": _norm,
    "rms_norm_of_heads": _head_norm,
    "silu_and_mul": _silu,
    "filter_and_draw": _draw,
    "fixed_order_matmul": _matmul,
    "int8_matmul": _int8,
    "add_lora": _lora,
}


def build_loose(case: Case) -> dict[str, Any]:
    """Build what a launch takes for tensors whose strides are no multiples of 16."""
    usages = builds.build(case["operator"], case, is_packed=False)
    return {name: asdict(usage) for name, usage in usages.items()}


def decode_loop(case: Case) -> dict[str, Any]:
    """Build decode's attention kernel, with another number of stages if the case has one, and check its loop."""
    variant = builds.variants_of("paged_decode", case)["attend"]
    variant = replace(variant, num_stages=case.get("num_stages", variant.num_stages))
    return asdict(builds.check_decode_loop(variant, case))


def matmul_loop(case: Case) -> dict[str, Any]:
    """Build the linear with a fixed order of additions, and check its loop."""
    return asdict(builds.check_loop(builds.variants_of("fixed_order_matmul", case)["matmul"], case))


FLOAT8_CEILINGS = {"decode": 478, "prefill": 525}
"""Instructions of a loop over a cache of float8 as cut for an H100, heads of 128: what builds gave, and 2 %."""


def float8_loop(case: Case) -> dict[str, Any]:
    """Build attention over a cache of float8 for sm_90, and check what it needs and its loop."""
    geometry, options = Geometry(128, 4, 64, torch.bfloat16, has_scales=True), Options()
    table = load_table("h100")
    if case["operator"] == "decode":
        variant = attend_variant(geometry, "cuda", options, min_share=4, table=table, has_table_rows=True)
    else:
        variant = prefill_variant(geometry, "cuda", options, table=table, has_table_rows=True)
    problems = check_usage(compile_variant(variant, TARGETS["sm_90"]), TARGETS["sm_90"])
    assert not problems, problems
    loop = builds.check_loop(variant, {"target": "sm_90"})
    assert loop.instructions <= FLOAT8_CEILINGS[case["operator"]], loop
    return asdict(loop)


class _Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def plan_launches(_: Case) -> dict[str, Any]:
    """Plan a decode step. Returns its launches, and torch's operations beside them."""
    launches: list[object] = []
    seq_lens = torch.ones(NUM_ROWS, dtype=torch.int32)
    with compiling_only(), patch.object(Variant, "launch", lambda *launch: launches.append(launch)):
        with _Operations() as operations:
            kernels.plan_decode(seq_lens, num_kv_heads=KV_HEADS, window=100)
    return {"launches": len(launches), "operations": sorted(operations.names)}


QUESTIONS: Mapping[str, Callable[[Case], Mapping[str, Any]]] = {
    "driver_calls": compare_driver_calls,
    "driver_calls_of_mixture": compare_mixed_driver_calls,
    "launch_keys": count_keys,
    "launch_key_of_stride": key_of,
    "loose_builds": build_loose,
    "decode_loop": decode_loop,
    "matmul_loop": matmul_loop,
    "float8_loop": float8_loop,
    "plan_launches": plan_launches,
}
"""What a process that compiles answers, beside builds."""
