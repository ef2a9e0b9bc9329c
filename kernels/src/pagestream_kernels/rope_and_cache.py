"""Norm and rotary position embedding of query and key, fused with the write of key and value into the paged cache."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pagestream_kernels.rope.arguments import (
    HeadNorm,
    check_rotation,
    rotation_arguments,
    rotation_constants,
    rotation_signature,
)
from pagestream_kernels.rope.turn import pair_columns, turned, turned_reference
from pagestream_kernels.runtime import Variant, cdiv, kernel, require_launchable, tl


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
