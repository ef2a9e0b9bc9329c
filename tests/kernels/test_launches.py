"""Launches without a GPU: what a compiled kernel is looked up by, and what our launcher gives the driver.

A launch whose key is new compiles, and everything waits for it. The keys of a model's kernels must not depend on which
part of a tensor a step passes, or on how many rows it has.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pagestream_kernels as kernels
import pytest
import torch
from pagestream_kernels.aot import TARGETS
from pagestream_kernels.launcher import compilations
from pagestream_kernels.prebuild import AbsentGPU
from pagestream_kernels.runtime import Variant, compiling_only, triton
from support.kernels.stand_in_driver import StandInDriver
from support.kernels.worker import KernelWorker
from support.pairwise import Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import cases as kernel_cases

pytestmark = pytest.mark.builds

PARTS = ((0, 1), (0, 2), (1, 1), (1, 3), (2, 16), (3, 17), (5, 32), (7, 33), (16, 48))
"""(first row, rows) of what a step passes."""
NUM_ROWS = 64
BLOCKS = 4
HEADS, KV_HEADS = 4, 2

Keys = dict[str, set[str]]
FAR = 2**31  # elements; a product of int32 wraps around here


def spread(tensor: Tensor, axis: int, stride: int | None = None) -> Tensor:
    """The tensor with a stride in `axis`: by default one below 2**31 of which multiples pass it.

    As much memory lies before its first element: what an offset that wrapped around reads there is zero.
    """
    last = tensor.shape[axis] - 1
    rest = tensor.select(axis, 0).contiguous()
    if stride is None:
        stride = max(-(-FAR // last), rest.numel()) if last > 1 else FAR - 1
    with tempfile.TemporaryFile() as file:
        file.truncate((FAR + stride * last + rest.numel()) * tensor.element_size())
        memory = mmap.mmap(file.fileno(), 0)
    strides = [*rest.stride()]
    strides.insert(axis, stride)
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, strides, FAR).copy_(tensor)


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


def count_keys(operator: str, size: int) -> dict[str, int]:
    """Launch one operator over all parts of its tensors; returns the number of keys of each of its kernels."""
    with recorded() as keys:
        LAUNCHES[operator](size, torch.float16)
    return {name: len(found) for name, found in keys.items()}


def key_of(stride: int) -> str:
    """The key of `silu_and_mul` on two rows that lie `stride` elements apart."""
    with recorded() as keys:
        kernels.silu_and_mul(spread(torch.zeros(2, 128), 0, stride=stride))
    (key,) = keys["_silu_and_mul_kernel"]
    return key


def compare_driver_calls(operator: str, size: int) -> dict[str, Any]:
    """Launch one operator over all parts of its tensors, each by Triton's `run` and by our launcher. Returns how many
    launches gave the driver the same, how many there were, and how many of ours went through Triton."""
    return _compare_driver_calls(lambda: LAUNCHES[operator](size, torch.float16))


def compare_mixed_driver_calls() -> dict[str, Any]:
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


class _Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def plan_launches() -> dict[str, Any]:
    """Plan a decode step. Returns its launches, and torch's operations beside them."""
    launches: list[object] = []
    seq_lens = torch.ones(NUM_ROWS, dtype=torch.int32)
    with compiling_only(), patch.object(Variant, "launch", lambda *launch: launches.append(launch)):
        with _Operations() as operations:
            kernels.plan_decode(seq_lens, num_kv_heads=KV_HEADS, window=100)
    return {"launches": len(launches), "operations": sorted(operations.names)}


SIZES = {
    "paged_decode": (128, 80, 5),  # of a head; rows of 4 * 5 elements are not at multiples of 16 bytes
    "plan_decode": (100,),  # of the window
    "paged_prefill": (128, 80, 5),
    "rope_and_cache": (128, 80, 6),
    "rms_norm": (256, 123),
    "rms_norm_of_heads": (128, 20),
    "silu_and_mul": (256, 123),
    "filter_and_draw": (256, 123),
    "fixed_order_matmul": (256, 123),
    "int8_matmul": (256,),
    "add_lora": (256,),
}
FEW = ("rms_norm", "paged_decode")
"""Operators of which `make test` compiles kernels to launch them."""


@pytest.mark.parametrize(
    ("operator", "size"),
    [
        pytest.param(name, size, marks=() if size == sizes[-1] else pytest.mark.slow)
        for name, sizes in SIZES.items()
        for size in sizes
    ],
)
def test_parts_and_shapes_have_one_key(compiler: KernelWorker, operator: str, size: int) -> None:
    counts = compiler.run(count_keys, operator, size)
    assert len(counts) == {"paged_decode": 3, "add_lora": 2}.get(operator, 1)  # plan, attention, merge; both products
    assert set(counts.values()) == {2 if operator == "paged_prefill" else 1}, counts  # prefill: for results of NaN


def test_stride_beyond_31_bits_is_passed_whole(compiler: KernelWorker) -> None:
    near, far = (compiler.run(key_of, stride) for stride in (2**31 - 16, 2**31))
    assert "('i64', 'D')" not in near
    assert "('i64', 'D')" in far


@pytest.mark.parametrize(
    ("operator", "size"),
    [pytest.param(name, sizes[0], marks=() if name in FEW else pytest.mark.slow) for name, sizes in SIZES.items()],
)
def test_launcher_gives_the_driver_what_triton_gives_it(compiler: KernelWorker, operator: str, size: int) -> None:
    found = compiler.run(compare_driver_calls, operator, size)
    assert found["equal"] == found["launches"] > 0
    assert found["through_triton"] == {"paged_decode": 3, "paged_prefill": 2, "add_lora": 2}.get(operator, 1)


@pytest.mark.slow
def test_launcher_tells_dtypes_strides_and_alignments_apart(compiler: KernelWorker) -> None:
    found = compiler.run(compare_mixed_driver_calls)
    assert found["equal"] == found["launches"] == 2 * found["through_triton"]


def test_a_plan_is_one_launch_and_no_operation(compiler: KernelWorker) -> None:
    found = compiler.run(plan_launches)
    assert found["launches"] == 1
    assert {name.split(".")[1] for name in found["operations"]} <= {"empty", "unbind"}, found


# -- tensors with gaps of 2**31 elements --------------------------------------------------------------------------

WIDE_CASE: Case = {
    "head_dim": 64,
    "group_size": 4,
    "block_size": 8,
    "dtype": "float16",
    "layout": kernel_cases.LAYOUTS[0],
    "window": None,
    "soft_cap": None,
    "sinks": False,
    "slopes": None,
}
ROW_AXES = ("token", "head")
CACHE_AXES = ("block", "token", "head", "dim")

_ATTENTION = {"query": ROW_AXES, "out": ROW_AXES, "cache": CACHE_AXES}
WIDE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "paged_decode": _ATTENTION,
    "paged_prefill": _ATTENTION,
    "copy_blocks": {"rows": ("token", "head")},
    "rope_and_cache": {"query": ROW_AXES, "key": ROW_AXES, "cache": CACHE_AXES},
    "rms_norm": {"rows": ROW_AXES},
    "silu_and_mul": {"rows": ("token",)},
    "filter_and_draw": {"rows": ("token",)},
}
"""By kernel: the tensors that get gaps, and in which dimensions one after the other."""


class Wide:
    """Gives gaps to the tensors of one name."""

    def __init__(self, name: str, axis: str) -> None:
        self._name = name
        self._axis = (CACHE_AXES if name == "cache" else ROW_AXES).index(axis)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return spread(tensor, self._axis) if name == self._name else tensor


def check_wide_offsets(kernel: str, tensor: str, axis: str) -> None:
    """Run one kernel on tensors with gaps against its reference on the same tensors.

    Such a tensor lies in a file without blocks, of which the system stores only the pages that are written.
    """
    WIDE_CHECKS[kernel](Wide(tensor, axis), torch.device("cpu"))


def _check_decode(wide: Wide, device: torch.device) -> None:
    lengths = [5, 19, 12]
    cache = kernel_cases.make_cache(WIDE_CASE, lengths, device)
    query, _, _ = kernel_cases.fused_rows(WIDE_CASE, len(lengths), device)
    arguments = (
        wide("query", query),
        wide("cache", cache.key),
        wide("cache", cache.value),
        cache.tables,
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    actual = kernels.paged_decode_attention(*arguments, scale=0.125, out=wide("out", torch.zeros_like(query)))
    kernel_cases.assert_close(actual, kernels.paged_decode_attention_reference(*arguments, scale=0.125), WIDE_CASE)


def _check_prefill(wide: Wide, device: torch.device) -> None:
    lengths, new = [5, 19], [5, 3]
    cache = kernel_cases.make_cache(WIDE_CASE, lengths, device)
    query, _, _ = kernel_cases.fused_rows(WIDE_CASE, sum(new), device)
    arguments = (
        wide("query", query),
        wide("cache", cache.key),
        wide("cache", cache.value),
        cache.tables,
        torch.tensor([0, 5, 8], dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    actual = kernels.paged_prefill_attention(*arguments, scale=0.125, out=wide("out", torch.zeros_like(query)))
    expected = kernels.paged_prefill_attention_reference(*arguments, scale=0.125)
    kernel_cases.assert_close(actual, expected, WIDE_CASE)


def _check_rope(wide: Wide, device: torch.device) -> None:
    num_tokens = 5
    cache = kernel_cases.make_cache(WIDE_CASE, [2 * num_tokens], device)
    query, key, value = kernel_cases.fused_rows(WIDE_CASE, num_tokens, device)
    query, key, value = wide("query", query), wide("key", key), wide("key", value)
    caches = wide("cache", cache.key), wide("cache", cache.value)
    angles = torch.rand(200, 16) * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions = torch.tensor([3, 199, 0, 7, 8], device=device)
    slots = torch.tensor([39, 17, -1, 0, 8], device=device)
    expected = (query.clone(), *(cache.clone() for cache in caches))
    kernels.rope_and_cache_reference(expected[0], key, value, cos_sin, positions, *expected[1:], slots)
    kernels.rope_and_cache(query, key, value, cos_sin, positions, *caches, slots)
    for actual, wanted in zip((query, *caches), expected, strict=True):
        kernel_cases.assert_close(actual, wanted, WIDE_CASE)


def _check_copy_blocks(wide: Wide, device: torch.device) -> None:
    blocks, expected = (wide("rows", torch.arange(72.0, device=device).view(3, 3, 8)) for _ in range(2))
    pairs = torch.tensor([[2, 0]], device=device)
    kernels.copy_blocks(blocks, blocks, pairs)
    kernels.copy_blocks_reference(expected, expected, pairs)
    assert torch.equal(blocks, expected)


def _check_rms_norm(wide: Wide, device: torch.device) -> None:
    x = wide("rows", torch.randn(3, 4, 64, device=device).half())
    residual = wide("rows", torch.randn(3, 4, 64, device=device).half())
    weight = torch.randn(64, device=device).half()
    actual = kernels.rms_norm(x, weight, eps=kernel_cases.EPS, residual=residual)
    expected = kernels.rms_norm_reference(x, weight, eps=kernel_cases.EPS, residual=residual)
    for ours, wanted in zip(actual, expected, strict=True):
        kernel_cases.assert_close(ours, wanted, WIDE_CASE)


def _check_silu_and_mul(wide: Wide, device: torch.device) -> None:
    gate_up = wide("rows", torch.randn(3, 128, device=device).half())
    kernel_cases.assert_close(kernels.silu_and_mul(gate_up), kernels.silu_and_mul_reference(gate_up), WIDE_CASE)


def _check_filter_and_draw(wide: Wide, device: torch.device) -> None:
    options = {"shape": (4, 300), "strided": False, "values": "normal", "top_k": True, "top_p": True, "min_p": True}
    logits, columns = kernel_cases.sampling_rows(options)
    token_ids, _ = kernels.filter_and_draw(wide("rows", logits), **columns)
    assert token_ids.tolist() == kernels.filter_and_draw_reference(logits, **columns)[0].tolist()


WIDE_CHECKS: Mapping[str, Callable[[Wide, torch.device], None]] = {
    "paged_decode": _check_decode,
    "paged_prefill": _check_prefill,
    "copy_blocks": _check_copy_blocks,
    "rope_and_cache": _check_rope,
    "rms_norm": _check_rms_norm,
    "silu_and_mul": _check_silu_and_mul,
    "filter_and_draw": _check_filter_and_draw,
}


@pytest.mark.parametrize(
    ("kernel", "tensor", "axis"),
    [
        pytest.param(kernel, tensor, axis, marks=() if (tensor, axis) == ("cache", "block") else pytest.mark.slow)
        for kernel, tensors in WIDE.items()
        for tensor, axes in tensors.items()
        for axis in axes
    ],
)
def test_offsets_pass_31_bits(interpreter: KernelWorker, kernel: str, tensor: str, axis: str) -> None:
    interpreter.run(check_wide_offsets, kernel, tensor, axis)
