"""Norm and rotary position embedding of query and key, fused with the write of key and value into the paged cache.

The arguments of such kernels, their checks and types, and one head's way from the projection's output to attention are
here for `rope_and_quantise.py` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pagestream_kernels.checks import INDEX_DTYPES, check_dtype, check_last_stride, check_same_device, check_shape
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.paging import check_cache
from pagestream_kernels.runtime import Variant, cdiv, jit, kernel, next_power_of_two, pointer_to, require_launchable, tl


@kernel(
    "positions_ptr",
    "slot_mapping_ptr",
    pointers=("query_ptr", "key_ptr", "value_ptr"),
    strides=(
        "query_stride_n",
        "query_stride_h",
        "key_stride_n",
        "key_stride_h",
        "value_stride_n",
        "value_stride_h",
    ),
)
def _rope_and_cache_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    query_weight_ptr: tl.tensor,
    key_weight_ptr: tl.tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    query_stride_n: tl.tensor,
    query_stride_h: tl.tensor,
    key_stride_n: tl.tensor,
    key_stride_h: tl.tensor,
    value_stride_n: tl.tensor,
    value_stride_h: tl.tensor,
    cos_sin_stride: tl.tensor,
    key_cache_stride_b: tl.tensor,
    key_cache_stride_t: tl.tensor,
    key_cache_stride_h: tl.tensor,
    key_cache_stride_d: tl.tensor,
    value_cache_stride_b: tl.tensor,
    value_cache_stride_t: tl.tensor,
    value_cache_stride_h: tl.tensor,
    value_cache_stride_d: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_query_tiles = tl.cdiv(num_heads, BLOCK_HEADS)

    # -- cosines and sines of this position --
    half = tl.arange(0, BLOCK_HALF)
    half_mask = half < HALF_DIM
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride
    cos = tl.load(angle_ptr + half, mask=half_mask, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle_ptr + HALF_DIM + half, mask=half_mask, other=0.0).to(tl.float32)[None, :]
    firsts, seconds, columns = pair_columns(HALF_DIM, BLOCK_HALF, BLOCK_DIM, INTERLEAVED)
    is_rest = ((columns >= 2 * HALF_DIM) & (columns < HEAD_DIM))[None, :]

    if tile < num_query_tiles:
        # -- the query in place --
        heads = (tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        head_mask = (heads < num_heads)[:, None]
        row_ptrs = query_ptr + token * query_stride_n + heads[:, None] * query_stride_h
        first, second, rest = turned(
            *(row_ptrs, head_mask, cos, sin, query_weight_ptr, eps),
            *(HEAD_DIM, HALF_DIM, BLOCK_HALF, BLOCK_DIM, HAS_NORM, INTERLEAVED),
        )
        dtype = query_ptr.dtype.element_ty
        mask = head_mask & half_mask[None, :]
        tl.store(row_ptrs + firsts[None, :], first.to(dtype), mask=mask)
        tl.store(row_ptrs + seconds[None, :], second.to(dtype), mask=mask)
        if HAS_NORM and 2 * HALF_DIM < HEAD_DIM:
            tl.store(row_ptrs + columns[None, :], rest.to(dtype), mask=head_mask & is_rest)
    else:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if slot >= 0:
            block = slot // CACHE_BLOCK
            offset = slot % CACHE_BLOCK
            heads = ((tile - num_query_tiles) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
            head_mask = (heads < num_kv_heads)[:, None]

            # -- the key into the cache --
            first, second, rest = turned(
                *(key_ptr + token * key_stride_n + heads[:, None] * key_stride_h, head_mask, cos, sin),
                *(key_weight_ptr, eps, HEAD_DIM, HALF_DIM, BLOCK_HALF, BLOCK_DIM, HAS_NORM, INTERLEAVED),
            )
            dtype = key_cache_ptr.dtype.element_ty
            row_ptrs = key_cache_ptr + block * key_cache_stride_b + offset * key_cache_stride_t
            row_ptrs += heads[:, None] * key_cache_stride_h
            mask = head_mask & half_mask[None, :]
            tl.store(row_ptrs + firsts[None, :].to(tl.int64) * key_cache_stride_d, first.to(dtype), mask=mask)
            tl.store(row_ptrs + seconds[None, :].to(tl.int64) * key_cache_stride_d, second.to(dtype), mask=mask)
            wide_columns = columns[None, :].to(tl.int64)
            if 2 * HALF_DIM < HEAD_DIM:
                tl.store(row_ptrs + wide_columns * key_cache_stride_d, rest.to(dtype), mask=head_mask & is_rest)

            # -- the value --
            mask = head_mask & (columns < HEAD_DIM)[None, :]
            value_ptrs = value_ptr + token * value_stride_n + heads[:, None] * value_stride_h + columns[None, :]
            value_cache_ptrs = (
                value_cache_ptr
                + block * value_cache_stride_b
                + offset * value_cache_stride_t
                + heads[:, None] * value_cache_stride_h
                + wide_columns * value_cache_stride_d
            )
            tl.store(value_cache_ptrs, tl.load(value_ptrs, mask=mask, other=0.0), mask=mask)


@lru_cache(maxsize=256)
def rope_and_cache_variant(
    *,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    num_heads: int,
    dtype: torch.dtype,
    angle_dtype: torch.dtype = torch.float32,
    index_dtypes: tuple[torch.dtype, torch.dtype] = (torch.int64, torch.int64),
    has_norm: bool = False,
    interleaved: bool = False,
) -> Variant:
    """How the kernel is built; `index_dtypes` are those of the positions and of the slot mapping."""
    return Variant(
        kernel=_rope_and_cache_kernel,
        signature=rotation_signature(dtype, dtype, angle_dtype, index_dtypes, has_norm=has_norm),
        constants=rotation_constants(
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            block_size=block_size,
            num_heads=num_heads,
            has_norm=has_norm,
            interleaved=interleaved,
        ),
        num_warps=4,
        num_stages=1,
        unit_strides=("key_cache_stride_d", "value_cache_stride_d"),
    )


def rope_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm: HeadNorm | None = None,
    interleaved: bool = False,
) -> None:
    """Rotate the query in place, and write the rotated key and the value to their slots of the paged cache.

    Args:
        query: (num_tokens, num_heads, head_dim), float32, float16 or bfloat16, last dimension contiguous; changed.
        key, value: (num_tokens, num_kv_heads, head_dim) of the same dtype, last dimension contiguous; not changed.
        cos_sin: (max_position, rotary_dim), float32 or the query's dtype: the cosines of the rotary_dim / 2
            frequencies, then their sines. Dimensions from rotary_dim on are not rotated.
        positions: (num_tokens,), int32 or int64, each below max_position (not checked).
        key_cache, value_cache: (num_blocks, block_size, num_kv_heads, head_dim) with any strides, a permuted view too.
        slot_mapping: (num_tokens,), int32 or int64: block * block_size + offset, or negative for a token that is not
            written. Slots must lie in the cache and differ from each other (not checked).
        norm: `rms_norm` of each query and key head before its rotation, with the same bits as by that kernel; or None.
        interleaved: dimension 2i turns with 2i + 1 (GPT-J), instead of i with i + rotary_dim / 2 (NeoX, Llama).

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: RoFormer, https://arxiv.org/abs/2104.09864; computed in float32.
    """
    rows = (query, key, value, cos_sin, positions, key_cache, value_cache, slot_mapping)
    check_rotation(*rows, norm=norm)
    require_launchable(query.device, reference="rope_and_cache_reference")
    num_tokens, num_heads, head_dim = query.shape
    variant = rope_and_cache_variant(
        head_dim=head_dim,
        rotary_dim=cos_sin.shape[1],
        block_size=key_cache.shape[1],
        num_heads=num_heads,
        dtype=query.dtype,
        angle_dtype=cos_sin.dtype,
        index_dtypes=(positions.dtype, slot_mapping.dtype),
        has_norm=norm is not None,
        interleaved=interleaved,
    )
    block_heads = variant.constants["BLOCK_HEADS"]
    num_tiles = cdiv(num_heads, block_heads) + cdiv(key.shape[1], block_heads)
    variant.launch((num_tokens, num_tiles), rotation_arguments(*rows, norm=norm))


def rope_and_cache_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm: HeadNorm | None = None,
    interleaved: bool = False,
) -> None:
    """`rope_and_cache` in torch, on any device; same arguments, effects and errors."""
    check_rotation(query, key, value, cos_sin, positions, key_cache, value_cache, slot_mapping, norm=norm)
    query_weight, key_weight = (None, None) if norm is None else (norm.query_weight, norm.key_weight)
    eps = 1.0 if norm is None else norm.eps
    angles = cos_sin[positions.long()][:, None]
    query.copy_(turned_reference(query, angles, query_weight, eps, interleaved=interleaved))
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    blocks, offsets = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[blocks, offsets] = turned_reference(key, angles, key_weight, eps, interleaved=interleaved)[written]
    value_cache[blocks, offsets] = value[written]


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


@jit
def turned(
    row_ptrs: tl.tensor,
    row_mask: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Norm and rotate heads: first and second elements of the pairs that turn, in float32, and the unrotated rest.

    Args:
        row_ptrs: (heads, 1) first elements.
        row_mask: (heads, 1).
        cos, sin: (1 or heads, BLOCK_HALF) float32.
        weight_ptr: (HEAD_DIM,) of the norm.

    Returns:
        Two of (heads, BLOCK_HALF), and (heads, BLOCK_DIM), in float32.
    """
    firsts, seconds, rest = pair_columns(HALF_DIM, BLOCK_HALF, BLOCK_DIM, INTERLEAVED)
    turns = row_mask & (tl.arange(0, BLOCK_HALF) < HALF_DIM)[None, :]
    stays = row_mask & ((rest >= 2 * HALF_DIM) & (rest < HEAD_DIM))[None, :]
    first = tl.load(row_ptrs + firsts[None, :], mask=turns, other=0.0)
    second = tl.load(row_ptrs + seconds[None, :], mask=turns, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    others = tl.zeros((1, BLOCK_DIM), tl.float32)
    if 2 * HALF_DIM < HEAD_DIM:
        others = tl.load(row_ptrs + rest[None, :], mask=stays, other=0.0).to(tl.float32)
    if HAS_NORM:
        # -- rounded where `rms_norm` rounds --
        squares = tl.sum(first * first + second * second, axis=1)
        if 2 * HALF_DIM < HEAD_DIM:
            squares += tl.sum(others * others, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        half_mask = tl.arange(0, BLOCK_HALF) < HALF_DIM
        first_weight = tl.load(weight_ptr + firsts, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(weight_ptr + seconds, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        first = ((first * factor).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * factor).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
        if 2 * HALF_DIM < HEAD_DIM:
            rest_weight = tl.load(weight_ptr + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
            others = ((others * factor).to(dtype).to(tl.float32) * rest_weight).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin, others


@jit
def pair_columns(
    HALF_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The columns of the first and second elements of the pairs (BLOCK_HALF,), and all columns (BLOCK_DIM,)."""
    half = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        firsts = 2 * half
        seconds = 2 * half + 1
    else:
        firsts = half
        seconds = half + HALF_DIM
    return firsts, seconds, tl.arange(0, BLOCK_DIM)


def turned_reference(
    x: Tensor, angles: Tensor, weight: Tensor | None, eps: float, *, interleaved: bool = False
) -> Tensor:
    """`turned` in torch: heads (tokens, heads, head_dim) at `angles` (tokens, 1, rotary_dim), of x's dtype."""
    if weight is not None:
        values = x.float()
        normed = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
        x = normed.to(x.dtype) * weight
    cos, sin = angles.float().chunk(2, dim=-1)
    half = cos.shape[-1]
    pairs, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    first, second = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)
