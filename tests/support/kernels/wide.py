"""Kernels over tensors whose elements lie more than 2**31 apart: the references say the same of them.

Such a tensor lies in a file without blocks, of which the system stores only the pages that are written.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Mapping

import pagestream_kernels as kernels
import torch
from support.kernels import cases as kernel_cases
from support.pairwise import Case
from torch import Tensor

FAR = 2**31  # elements; a product of int32 wraps around here
CASE: Case = {
    "head_dim": 64,
    "group_size": 4,
    "block_size": 8,
    "dtype": "float16",
    "layout": kernel_cases.LAYOUTS[0],
    "window": None,
    "soft_cap": None,
    "sinks": False,
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


class Wide:
    """Gives gaps to the tensors of one name."""

    def __init__(self, name: str, axis: str) -> None:
        self._name = name
        self._axis = (CACHE_AXES if name == "cache" else ROW_AXES).index(axis)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return spread(tensor, self._axis) if name == self._name else tensor


def check_wide_offsets(case: Case, device: torch.device) -> None:
    """Run one kernel on tensors with gaps against its reference on the same tensors."""
    CHECKS[case["kernel"]](Wide(case["tensor"], case["axis"]), device)


def _check_decode(wide: Wide, device: torch.device) -> None:
    lengths = [5, 19, 12]
    cache = kernel_cases.make_cache(CASE, lengths, device)
    query, _, _ = kernel_cases.fused_rows(CASE, len(lengths), device)
    arguments = (
        wide("query", query),
        wide("cache", cache.key),
        wide("cache", cache.value),
        cache.tables,
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    actual = kernels.paged_decode_attention(*arguments, scale=0.125, out=wide("out", torch.zeros_like(query)))
    kernel_cases.assert_close(actual, kernels.paged_decode_attention_reference(*arguments, scale=0.125), CASE)


def _check_prefill(wide: Wide, device: torch.device) -> None:
    lengths, new = [5, 19], [5, 3]
    cache = kernel_cases.make_cache(CASE, lengths, device)
    query, _, _ = kernel_cases.fused_rows(CASE, sum(new), device)
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
    kernel_cases.assert_close(actual, expected, CASE)


def _check_rope(wide: Wide, device: torch.device) -> None:
    num_tokens = 5
    cache = kernel_cases.make_cache(CASE, [2 * num_tokens], device)
    query, key, value = kernel_cases.fused_rows(CASE, num_tokens, device)
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
        kernel_cases.assert_close(actual, wanted, CASE)


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
        kernel_cases.assert_close(ours, wanted, CASE)


def _check_silu_and_mul(wide: Wide, device: torch.device) -> None:
    gate_up = wide("rows", torch.randn(3, 128, device=device).half())
    kernel_cases.assert_close(kernels.silu_and_mul(gate_up), kernels.silu_and_mul_reference(gate_up), CASE)


def _check_filter_and_draw(wide: Wide, device: torch.device) -> None:
    options = {"shape": (4, 300), "strided": False, "values": "normal", "top_k": True, "top_p": True, "min_p": True}
    logits, columns = kernel_cases.sampling_rows(options)
    token_ids, _ = kernels.filter_and_draw(wide("rows", logits), **columns)
    assert token_ids.tolist() == kernels.filter_and_draw_reference(logits, **columns)[0].tolist()


CHECKS: Mapping[str, Callable[[Wide, torch.device], None]] = {
    "paged_decode": _check_decode,
    "paged_prefill": _check_prefill,
    "copy_blocks": _check_copy_blocks,
    "rope_and_cache": _check_rope,
    "rms_norm": _check_rms_norm,
    "silu_and_mul": _check_silu_and_mul,
    "filter_and_draw": _check_filter_and_draw,
}
