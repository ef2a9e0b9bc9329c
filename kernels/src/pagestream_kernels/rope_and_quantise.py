"""Rotation of query and key, fused with the write of key and value into a paged cache of float8."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pagestream_kernels.paging import FLOAT8
from pagestream_kernels.rope_and_cache import (
    TILE_ELEMENTS,
    HeadNorm,
    check_rotation,
    pair_columns,
    rotation_arguments,
    rotation_constants,
    rotation_signature,
    turned,
    turned_reference,
)
from pagestream_kernels.runtime import (
    INTERPRETED,
    Variant,
    cdiv,
    jit,
    kernel,
    next_power_of_two,
    require_launchable,
    tl,
)

LARGEST = tl.constexpr(448.0) if tl is not None else 448.0  # of float8 e4m3
LEAST_EXPONENT = -60  # of a scale
MOST_EXPONENT = 60


@jit
def _scale_exponent(largest: tl.tensor, LEAST: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """The least e for which largest / 2^e is a float8, within bounds: 448 is 1.75 * 2^8."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, LEAST), MOST)


@jit
def _power_of_two(exponent: tl.tensor) -> tl.tensor:
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@jit
def _largest(values: tl.tensor) -> tl.tensor:
    """The largest finite magnitude."""
    magnitudes = tl.abs(values)
    return tl.max(tl.max(tl.where(magnitudes < float("inf"), magnitudes, 0.0), axis=1), axis=0)


@jit
def _store_quantised(
    pointers: tl.tensor, values: tl.tensor, factor: tl.tensor, mask: tl.tensor, ROUNDS: tl.constexpr
) -> None:
    """Store values * factor as float8: what is too large as the largest, NaN as NaN.

    With ROUNDS they are rounded to the nearest float8 before: Triton's interpreter loses a carry into the exponent.
    """
    values = values * factor
    if ROUNDS:
        bits = values.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (values + 24576.0) - 24576.0  # whose neighbours are 2^-9 apart, as float8's least numbers are
        values = tl.where(tl.abs(values) < 0.015625, small, tl.where(tl.abs(values) < 512.0, nearest, values))
    values = tl.where(values > LARGEST, LARGEST, tl.where(values < -LARGEST, -LARGEST, values))
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@jit
def _rescale(
    page_ptr: tl.tensor,
    count: tl.tensor,
    factor: tl.tensor,
    token_stride: tl.tensor,
    column_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    """Multiply a page's first tokens by a factor."""
    columns = tl.arange(0, BLOCK_DIM).to(tl.int64)
    for start in range(0, count, BLOCK_TOKENS):
        tokens = (start + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
        mask = (tokens < count)[:, None] & (columns < HEAD_DIM)[None, :]
        pointers = page_ptr + tokens[:, None] * token_stride + columns[None, :] * column_stride
        _store_quantised(pointers, tl.load(pointers, mask=mask, other=0.0).to(tl.float32), factor, mask, ROUNDS)


@kernel(
    "positions_ptr",
    "slot_mapping_ptr",
    "num_tokens",
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
def _rope_and_quantise_kernel(  # noqa: PLR0912, PLR0915 - one kernel is one function
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    query_weight_ptr: tl.tensor,
    key_weight_ptr: tl.tensor,
    eps: float,
    num_tokens: int,
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
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_query_tiles = tl.cdiv(num_heads, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    half_mask = half < HALF_DIM
    firsts, seconds, columns = pair_columns(HALF_DIM, BLOCK_HALF, BLOCK_DIM, INTERLEAVED)
    is_rest = ((columns >= 2 * HALF_DIM) & (columns < HEAD_DIM))[None, :]

    if tile < num_query_tiles:
        # -- the query in place --
        angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride
        cos = tl.load(angle_ptr + half, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(angle_ptr + HALF_DIM + half, mask=half_mask, other=0.0).to(tl.float32)[None, :]
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
        # -- the program of a run's first token writes the run: tokens of consecutive slots of one block --
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        previous = tl.load(slot_mapping_ptr + token - 1, mask=token > 0, other=-2).to(tl.int64)
        offset = slot % CACHE_BLOCK
        if (slot >= 0) & ((offset == 0) | (previous != slot - 1)):
            steps = tl.arange(0, CACHE_BLOCK)
            slots = tl.load(slot_mapping_ptr + token + steps, mask=token + steps < num_tokens, other=-2).to(tl.int64)
            continues = (slots == slot + steps) & (offset + steps < CACHE_BLOCK)
            count = tl.min(tl.where(continues, CACHE_BLOCK, steps), axis=0)
            kv_head = (tile - num_query_tiles).to(tl.int64)
            block = slot // CACHE_BLOCK
            scale_index = block * num_kv_heads + kv_head
            key_page_ptr = key_cache_ptr + block * key_cache_stride_b + kv_head * key_cache_stride_h
            value_page_ptr = value_cache_ptr + block * value_cache_stride_b + kv_head * value_cache_stride_h
            # A block's first token finds the scales of its former owner.
            old_key_scale = tl.load(key_scales_ptr + scale_index, mask=offset > 0, other=0.0)
            old_value_scale = tl.load(value_scales_ptr + scale_index, mask=offset > 0, other=0.0)

            # -- twice over the run: the largest magnitudes, then the elements --
            key_largest = 0.0
            value_largest = 0.0
            key_factor = 1.0
            value_factor = 1.0
            for step in tl.static_range(2):
                for start in range(0, count, BLOCK_TOKENS):
                    places = start + tl.arange(0, BLOCK_TOKENS)
                    row_mask = (places < count)[:, None]
                    rows = token + places.to(tl.int64)
                    positions = tl.load(positions_ptr + rows, mask=places < count, other=0).to(tl.int64)
                    angle_ptrs = cos_sin_ptr + positions[:, None] * cos_sin_stride + half[None, :]
                    angle_mask = row_mask & half_mask[None, :]
                    cos = tl.load(angle_ptrs, mask=angle_mask, other=0.0).to(tl.float32)
                    sin = tl.load(angle_ptrs + HALF_DIM, mask=angle_mask, other=0.0).to(tl.float32)
                    first, second, rest = turned(
                        *(key_ptr + rows[:, None] * key_stride_n + kv_head * key_stride_h, row_mask, cos, sin),
                        *(key_weight_ptr, eps, HEAD_DIM, HALF_DIM, BLOCK_HALF, BLOCK_DIM, HAS_NORM, INTERLEAVED),
                    )
                    mask = row_mask & (columns < HEAD_DIM)[None, :]
                    value_ptrs = value_ptr + rows[:, None] * value_stride_n + kv_head * value_stride_h
                    values = tl.load(value_ptrs + columns[None, :], mask=mask, other=0.0).to(tl.float32)
                    if step == 0:
                        key_largest = tl.maximum(key_largest, tl.maximum(_largest(first), _largest(second)))
                        if 2 * HALF_DIM < HEAD_DIM:
                            key_largest = tl.maximum(key_largest, _largest(rest))
                        value_largest = tl.maximum(value_largest, _largest(values))
                    else:
                        tokens = (offset + places)[:, None]
                        row_ptrs = key_page_ptr + tokens * key_cache_stride_t
                        first_ptrs = row_ptrs + firsts[None, :].to(tl.int64) * key_cache_stride_d
                        second_ptrs = row_ptrs + seconds[None, :].to(tl.int64) * key_cache_stride_d
                        _store_quantised(first_ptrs, first, key_factor, angle_mask, ROUNDS)
                        _store_quantised(second_ptrs, second, key_factor, angle_mask, ROUNDS)
                        wide_columns = columns[None, :].to(tl.int64)
                        if 2 * HALF_DIM < HEAD_DIM:
                            _store_quantised(
                                row_ptrs + wide_columns * key_cache_stride_d,
                                rest,
                                key_factor,
                                row_mask & is_rest,
                                ROUNDS,
                            )
                        value_ptrs = value_page_ptr + tokens * value_cache_stride_t
                        _store_quantised(
                            value_ptrs + wide_columns * value_cache_stride_d, values, value_factor, mask, ROUNDS
                        )
                if step == 0:
                    key_exponent = _scale_exponent(key_largest, LEAST, MOST)
                    value_exponent = _scale_exponent(value_largest, LEAST, MOST)
                    key_scale = tl.maximum(old_key_scale, _power_of_two(key_exponent))
                    value_scale = tl.maximum(old_value_scale, _power_of_two(value_exponent))
                    key_factor = 1.0 / key_scale
                    value_factor = 1.0 / value_scale
                    # -- larger than what the block holds: its elements shrink by as much --
                    if (offset > 0) & (key_scale > old_key_scale):
                        _rescale(
                            *(key_page_ptr, offset, old_key_scale * key_factor),
                            *(key_cache_stride_t, key_cache_stride_d, HEAD_DIM, BLOCK_DIM, BLOCK_TOKENS, ROUNDS),
                        )
                    if (offset > 0) & (value_scale > old_value_scale):
                        _rescale(
                            *(value_page_ptr, offset, old_value_scale * value_factor),
                            *(value_cache_stride_t, value_cache_stride_d, HEAD_DIM, BLOCK_DIM, BLOCK_TOKENS, ROUNDS),
                        )
                    tl.store(key_scales_ptr + scale_index, key_scale)
                    tl.store(value_scales_ptr + scale_index, value_scale)
            if offset == 0:
                # -- no byte of a page is a NaN that was not written: attention reads values without a mask --
                for start in range(count, CACHE_BLOCK, BLOCK_TOKENS):
                    tokens = (start + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
                    mask = (tokens < CACHE_BLOCK)[:, None] & (columns < HEAD_DIM)[None, :]
                    pointers = value_page_ptr + tokens[:, None] * value_cache_stride_t
                    pointers += columns[None, :].to(tl.int64) * value_cache_stride_d
                    zeros = tl.zeros((BLOCK_TOKENS, BLOCK_DIM), tl.float32)
                    tl.store(pointers, zeros.to(pointers.dtype.element_ty), mask=mask)


@lru_cache(maxsize=256)
def rope_and_quantise_variant(
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
    signature = rotation_signature(dtype, FLOAT8, angle_dtype, index_dtypes, has_norm=has_norm)
    constants = rotation_constants(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        block_size=block_size,
        num_heads=num_heads,
        has_norm=has_norm,
        interleaved=interleaved,
    )
    return Variant(
        kernel=_rope_and_quantise_kernel,
        signature={**signature, **dict.fromkeys(("key_scales_ptr", "value_scales_ptr"), "*fp32"), "num_tokens": "i32"},
        constants={
            **constants,
            "BLOCK_TOKENS": min(block_size, max(1, TILE_ELEMENTS // next_power_of_two(head_dim))),
            "LEAST": LEAST_EXPONENT,
            "MOST": MOST_EXPONENT,
            "ROUNDS": INTERPRETED,
        },
        num_warps=4,
        num_stages=1,
        unit_strides=("key_cache_stride_d", "value_cache_stride_t"),
    )


def rope_and_quantise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    slot_mapping: Tensor,
    *,
    norm: HeadNorm | None = None,
    interleaved: bool = False,
) -> None:
    """Rotate the query in place, and write the rotated key and the value to their slots of a cache of float8.

    A block and KV head has a scale for keys and one for values: the least power of two by which all of its elements
    are at most 448. A token that needs a larger one multiplies the elements before it in the block, which is exact
    but for those below 2^-6 of a scale. The values of a fresh block's slots behind the last token become zeros.

    Args:
        query: (num_tokens, num_heads, head_dim), float32, float16 or bfloat16, last dimension contiguous; changed.
        key, value: (num_tokens, num_kv_heads, head_dim) of the same dtype, last dimension contiguous; not changed.
        cos_sin, positions: as for `rope_and_cache`.
        key_cache, value_cache: (num_blocks, block_size, num_kv_heads, head_dim) float8_e4m3fn with any strides; best
            with keys' elements and values' tokens as neighbours. block_size is 64, 128 or 256.
        key_scales, value_scales: (num_blocks, num_kv_heads) float32, contiguous; changed.
        slot_mapping: (num_tokens,), int32 or int64: block * block_size + offset, or negative for a token that is not
            written. A step's tokens of one block are neighbours, in slots that follow each other, and a block's tokens
            are written in order from its first slot (not checked).
        norm, interleaved: as for `rope_and_cache`.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.
    """
    rows = (query, key, value, cos_sin, positions, key_cache, value_cache, slot_mapping)
    check_rotation(*rows, key_scales=key_scales, value_scales=value_scales, norm=norm)
    require_launchable(query.device, reference="rope_and_quantise_reference")
    num_tokens, num_heads, head_dim = query.shape
    variant = rope_and_quantise_variant(
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
    arguments = rotation_arguments(*rows, norm=norm)
    variant.launch(
        (num_tokens, cdiv(num_heads, variant.constants["BLOCK_HEADS"]) + key.shape[1]),
        {**arguments, "key_scales_ptr": key_scales, "value_scales_ptr": value_scales, "num_tokens": num_tokens},
    )


def rope_and_quantise_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    slot_mapping: Tensor,
    *,
    norm: HeadNorm | None = None,
    interleaved: bool = False,
) -> None:
    """`rope_and_quantise` in torch, on any device, a token at a time; same arguments, effects and errors."""
    rows = (query, key, value, cos_sin, positions, key_cache, value_cache, slot_mapping)
    check_rotation(*rows, key_scales=key_scales, value_scales=value_scales, norm=norm)
    query_weight, key_weight = (None, None) if norm is None else (norm.query_weight, norm.key_weight)
    eps = 1.0 if norm is None else norm.eps
    angles = cos_sin[positions.long()][:, None]
    query.copy_(turned_reference(query, angles, query_weight, eps, interleaved=interleaved))
    rotated = turned_reference(key.float(), angles, None, eps, interleaved=interleaved)
    if key_weight is not None:
        normed = turned_reference(key, torch.tensor([1.0, 0.0], device=key.device), key_weight, eps)
        rotated = turned_reference(normed.float(), angles, None, eps, interleaved=interleaved)
    for index, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            place = divmod(slot, key_cache.shape[1])
            _write_reference(rotated[index], key_cache, key_scales, *place)
            if place[1] == 0:
                value_cache[place[0]] = torch.zeros((), dtype=FLOAT8)
            _write_reference(value[index].float(), value_cache, value_scales, *place)


def _write_reference(row: Tensor, cache: Tensor, scales: Tensor, block: int, offset: int) -> None:
    """Write one token (num_kv_heads, head_dim) to its slot."""
    magnitudes = row.abs()
    largest = magnitudes.where(magnitudes.isfinite(), 0.0).amax(dim=1)
    bits = largest.view(torch.int32)
    exponents = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    needed = torch.exp2(exponents.clamp(LEAST_EXPONENT, MOST_EXPONENT).float())
    page = cache[block]  # (block_size, num_kv_heads, head_dim)
    held = page.float()
    if offset == 0:
        scales[block] = needed
    scale = torch.maximum(scales[block], needed)
    if offset > 0:
        held[:offset] *= (scales[block] / scale)[:, None]
    held[offset] = (row / scale[:, None]).clamp(-448.0, 448.0)
    page.copy_(held.to(FLOAT8))
    scales[block] = scale
