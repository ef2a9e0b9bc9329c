"""The arguments of the kernels that rotate and write to a cache: their checks, types and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagestream_kernels.checks import INDEX_DTYPES, check_dtype, check_last_stride, check_same_device, check_shape
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.paging import check_cache
from pagestream_kernels.runtime import next_power_of_two, pointer_to

TILE_ELEMENTS = 2048  # of heads of a token, or of tokens of a head, that a program holds at a time


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The norms of query and key heads before their rotation (Qwen3, Gemma 3)."""

    query_weight: Tensor  # (head_dim,) of the query's dtype
    key_weight: Tensor  # as query_weight
    eps: float


def rotation_signature(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    angle_dtype: torch.dtype,
    index_dtypes: tuple[torch.dtype, torch.dtype],
    *,
    has_norm: bool,
) -> dict[str, str]:
    """Types of the arguments that the kernels over a cache have in common; `rotation_arguments` are the values."""
    pointer, angles = pointer_to(dtype), pointer_to(angle_dtype)
    cache_strides = [f"{cache}_cache_stride_{axis}" for cache in ("key", "value") for axis in "bthd"]
    strides = [f"{name}_stride_{axis}" for name in ("query", "key", "value") for axis in "nh"]
    return {
        **dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), pointer),
        **dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), pointer_to(cache_dtype)),
        "cos_sin_ptr": angles,
        **dict.fromkeys(("query_weight_ptr", "key_weight_ptr"), pointer if has_norm else angles),
        "eps": "fp32",
        "positions_ptr": pointer_to(index_dtypes[0]),
        "slot_mapping_ptr": pointer_to(index_dtypes[1]),
        **dict.fromkeys(("num_heads", "num_kv_heads", *strides, "cos_sin_stride", *cache_strides), "i32"),
    }


def rotation_constants(
    *, head_dim: int, rotary_dim: int, block_size: int, num_heads: int, has_norm: bool, interleaved: bool
) -> dict[str, Any]:
    """The constants that the kernels over a cache have in common."""
    block_dim = next_power_of_two(head_dim)
    return {
        "HEAD_DIM": head_dim,
        "HALF_DIM": rotary_dim // 2,
        "CACHE_BLOCK": block_size,
        "BLOCK_HEADS": min(next_power_of_two(num_heads), max(1, TILE_ELEMENTS // block_dim)),
        "BLOCK_HALF": next_power_of_two(rotary_dim // 2),
        "BLOCK_DIM": block_dim,
        "HAS_NORM": has_norm,
        "INTERLEAVED": interleaved,
    }


def rotation_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm: HeadNorm | None,
) -> dict[str, Any]:
    """The arguments of `rotation_signature`, from checked tensors."""
    strides = {
        f"{name}_stride_{axis}": stride
        for name, axes, tensor in (
            ("query", "nh", query),
            ("key", "nh", key),
            ("value", "nh", value),
            ("key_cache", "bthd", key_cache),
            ("value_cache", "bthd", value_cache),
        )
        for axis, stride in zip(axes, tensor.stride(), strict=False)
    }
    return {
        "query_ptr": query,
        "key_ptr": key,
        "value_ptr": value,
        "cos_sin_ptr": cos_sin,
        "positions_ptr": positions,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "slot_mapping_ptr": slot_mapping,
        "query_weight_ptr": cos_sin if norm is None else norm.query_weight,
        "key_weight_ptr": cos_sin if norm is None else norm.key_weight,
        "eps": 1.0 if norm is None else norm.eps,
        "num_heads": query.shape[1],
        "num_kv_heads": key.shape[1],
        "cos_sin_stride": cos_sin.stride(0),
        **strides,
    }


def check_rotation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    norm: HeadNorm | None = None,
) -> None:
    """Check the arguments of `rope_and_cache`, or with scales of `rope_and_quantise`."""
    geometry = check_cache(query, key_cache, value_cache, key_scales, value_scales)
    num_tokens, num_kv_heads = query.shape[0], key_cache.shape[2]
    for name, tensor in (("key", key), ("value", value)):
        check_shape(
            name,
            tensor,
            (num_tokens, num_kv_heads, geometry.head_dim),
            meaning="(num_tokens, num_kv_heads, head_dim)",
        )
        check_dtype(name, tensor, (query.dtype,))
        check_last_stride(name, tensor)
    check_shape("cos_sin", cos_sin, (None, None), meaning="(max_position, rotary_dim)")
    check_dtype("cos_sin", cos_sin, (torch.float32, query.dtype))
    check_last_stride("cos_sin", cos_sin)
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or not 2 <= rotary_dim <= geometry.head_dim:
        raise KernelArgumentError(
            f"cos_sin: expected an even rotary_dim of 2 to head_dim={geometry.head_dim}, got {rotary_dim}"
        )
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        check_shape(name, tensor, (num_tokens,), meaning="(num_tokens,)")
        check_dtype(name, tensor, INDEX_DTYPES)
        check_last_stride(name, tensor)
    check_same_device(
        ("query", query),
        ("key", key),
        ("value", value),
        ("cos_sin", cos_sin),
        ("positions", positions),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("slot_mapping", slot_mapping),
        ("key_scales", key_scales),
        ("value_scales", value_scales),
    )
    if norm is not None:
        _check_norm(norm, query)


def _check_norm(norm: HeadNorm, query: Tensor) -> None:
    for name, weight in (("norm.query_weight", norm.query_weight), ("norm.key_weight", norm.key_weight)):
        check_dtype(name, weight, (query.dtype,))
        check_shape(name, weight, (query.shape[2],), meaning="(head_dim,)")
        check_last_stride(name, weight)
        check_same_device(("query", query), (name, weight))
    if not norm.eps > 0:
        raise KernelArgumentError(f"norm.eps: expected a number > 0, got {norm.eps}")
