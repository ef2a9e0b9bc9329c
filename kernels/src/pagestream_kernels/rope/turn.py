"""One head's way from the projection's output to attention: the norm of queries and keys, and the rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from pagestream_kernels.runtime import jit, tl


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
