"""Rotary position embedding of query and key, fused with the write of key and value into the paged cache."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pagestream_kernels.checks import (
    INDEX_DTYPES,
    check_dtype,
    check_last_stride,
    check_same_device,
    check_shape,
)
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.paging import check_cache
from pagestream_kernels.runtime import (
    Variant,
    cdiv,
    kernel,
    next_power_of_two,
    pointer_to,
    require_launchable,
    tl,
)

TILE_ELEMENTS = 2048  # heads of one token share a program up to this many elements


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

    if tile < num_query_tiles:
        # -- rotate the query in place --
        heads = (tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        mask = (heads < num_heads)[:, None] & half_mask[None, :]
        first_ptrs = query_ptr + token * query_stride_n + heads[:, None] * query_stride_h + half[None, :]
        first = tl.load(first_ptrs, mask=mask, other=0.0)
        second = tl.load(first_ptrs + HALF_DIM, mask=mask, other=0.0)
        rotated_first = first.to(tl.float32) * cos - second.to(tl.float32) * sin
        rotated_second = second.to(tl.float32) * cos + first.to(tl.float32) * sin
        tl.store(first_ptrs, rotated_first.to(first.dtype), mask=mask)
        tl.store(first_ptrs + HALF_DIM, rotated_second.to(first.dtype), mask=mask)
    else:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if slot >= 0:
            block = slot // CACHE_BLOCK
            offset = slot % CACHE_BLOCK
            heads = ((tile - num_query_tiles) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
            head_mask = (heads < num_kv_heads)[:, None]

            # -- rotate the key into the cache --
            mask = head_mask & half_mask[None, :]
            key_row_ptrs = key_ptr + token * key_stride_n + heads[:, None] * key_stride_h
            key_cache_row_ptrs = (
                key_cache_ptr
                + block * key_cache_stride_b
                + offset * key_cache_stride_t
                + heads[:, None] * key_cache_stride_h
            )
            first = tl.load(key_row_ptrs + half[None, :], mask=mask, other=0.0)
            second = tl.load(key_row_ptrs + HALF_DIM + half[None, :], mask=mask, other=0.0)
            rotated_first = first.to(tl.float32) * cos - second.to(tl.float32) * sin
            rotated_second = second.to(tl.float32) * cos + first.to(tl.float32) * sin
            cache_ptrs = key_cache_row_ptrs + half[None, :].to(tl.int64) * key_cache_stride_d
            tl.store(cache_ptrs, rotated_first.to(first.dtype), mask=mask)
            second_ptrs = key_cache_row_ptrs + (half + HALF_DIM)[None, :].to(tl.int64) * key_cache_stride_d
            tl.store(second_ptrs, rotated_second.to(first.dtype), mask=mask)

            # -- copy the key's unrotated rest and the value --
            columns = tl.arange(0, BLOCK_DIM)
            mask = head_mask & (columns < HEAD_DIM)[None, :]
            if 2 * HALF_DIM < HEAD_DIM:
                rest_mask = mask & (columns >= 2 * HALF_DIM)[None, :]
                rest = tl.load(key_row_ptrs + columns[None, :], mask=rest_mask, other=0.0)
                tl.store(key_cache_row_ptrs + columns[None, :].to(tl.int64) * key_cache_stride_d, rest, mask=rest_mask)
            value_ptrs = value_ptr + token * value_stride_n + heads[:, None] * value_stride_h + columns[None, :]
            value_cache_ptrs = (
                value_cache_ptr
                + block * value_cache_stride_b
                + offset * value_cache_stride_t
                + heads[:, None] * value_cache_stride_h
                + columns[None, :].to(tl.int64) * value_cache_stride_d
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
) -> Variant:
    """How the kernel is built; `index_dtypes` are those of the positions and of the slot mapping."""
    pointer = pointer_to(dtype)
    block_dim = next_power_of_two(head_dim)
    cache_strides = [f"{cache}_cache_stride_{axis}" for cache in ("key", "value") for axis in "bthd"]
    strides = [f"{name}_stride_{axis}" for name in ("query", "key", "value") for axis in "nh"]
    return Variant(
        kernel=_rope_and_cache_kernel,
        signature={
            **dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr"), pointer),
            "cos_sin_ptr": pointer_to(angle_dtype),
            "positions_ptr": pointer_to(index_dtypes[0]),
            "slot_mapping_ptr": pointer_to(index_dtypes[1]),
            **dict.fromkeys(("num_heads", "num_kv_heads", *strides, "cos_sin_stride", *cache_strides), "i32"),
        },
        constants={
            "HEAD_DIM": head_dim,
            "HALF_DIM": rotary_dim // 2,
            "CACHE_BLOCK": block_size,
            "BLOCK_HEADS": min(next_power_of_two(num_heads), max(1, TILE_ELEMENTS // block_dim)),
            "BLOCK_HALF": next_power_of_two(rotary_dim // 2),
            "BLOCK_DIM": block_dim,
        },
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
) -> None:
    """Rotate the query in place, and write the rotated key and the value to their slots of the paged cache.

    Args:
        query: (num_tokens, num_heads, head_dim), float32, float16 or bfloat16, last dimension contiguous; changed.
        key, value: (num_tokens, num_kv_heads, head_dim) of the same dtype, last dimension contiguous; not changed.
        cos_sin: (max_position, rotary_dim), float32 or the query's dtype: the cosines of the rotary_dim / 2
            frequencies, then their sines. Dimension i turns with i + rotary_dim / 2 (the NeoX and Llama pairing);
            dimensions from rotary_dim on are left as they are.
        positions: (num_tokens,), int32 or int64, each below max_position (not checked).
        key_cache, value_cache: (num_blocks, block_size, num_kv_heads, head_dim) with any strides, a permuted view too.
        slot_mapping: (num_tokens,), int32 or int64: block * block_size + offset, or negative for a token that is not
            written. Slots must lie in the cache and differ from each other (not checked).

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.

    Source: RoFormer, https://arxiv.org/abs/2104.09864; computed in float32.
    """
    _check(query, key, value, cos_sin, positions, key_cache, value_cache, slot_mapping)
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
    )
    block_heads = variant.constants["BLOCK_HEADS"]
    num_tiles = cdiv(num_heads, block_heads) + cdiv(key.shape[1], block_heads)
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
    variant.launch(
        (num_tokens, num_tiles),
        {
            "query_ptr": query,
            "key_ptr": key,
            "value_ptr": value,
            "cos_sin_ptr": cos_sin,
            "positions_ptr": positions,
            "key_cache_ptr": key_cache,
            "value_cache_ptr": value_cache,
            "slot_mapping_ptr": slot_mapping,
            "num_heads": num_heads,
            "num_kv_heads": key.shape[1],
            "cos_sin_stride": cos_sin.stride(0),
            **strides,
        },
    )


def rope_and_cache_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """`rope_and_cache` in torch, on any device; same arguments, effects and errors."""
    _check(query, key, value, cos_sin, positions, key_cache, value_cache, slot_mapping)
    angles = cos_sin[positions.long()].float()[:, None]
    cos, sin = angles.chunk(2, dim=-1)
    query.copy_(_rotate(query, cos, sin))
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    blocks, offsets = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[blocks, offsets] = _rotate(key, cos, sin)[written]
    value_cache[blocks, offsets] = value[written]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    geometry = check_cache(query, key_cache, value_cache)
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
    )
