"""Pages of float8 with a scale for each block and head, in torch operations (docs/design/kv-cache.md)."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of the format, which has no infinity."""
_MOST_EXPONENT = 60
"""Of a scale, and the least with a minus sign."""


def scales_for(largest: Tensor) -> Tensor:
    """Return, of finite magnitudes in float32, the least powers of two by which they are at most LARGEST."""
    bits = largest.view(torch.int32)
    exponents = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).int()  # 448 is 1.75 * 2^8
    return torch.exp2(exponents.clamp(-_MOST_EXPONENT, _MOST_EXPONENT).float())


def write_scaled(pages: Tensor, scales: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write tokens to their blocks. Where they need a larger scale, what a block has already is rounded again.

    Args:
        pages: (num_blocks, num_kv_heads, block_size, head_dim) FLOAT8.
        scales: (num_blocks, num_kv_heads) float32.
        rows: (tokens, num_kv_heads, head_dim).
        slots: (tokens,) int64: block * block_size + offset, as `KVStore.write` has them.
    """
    size, rows, raw = pages.shape[2], rows.float(), pages.view(torch.uint8)
    blocks, places = torch.unique(slots // size, return_inverse=True)
    offsets = slots % size
    is_new = torch.zeros_like(blocks, dtype=torch.bool).index_fill_(0, places[offsets == 0], True)
    magnitudes = rows.abs()
    largest = magnitudes.where(magnitudes.isfinite(), 0.0).amax(dim=2)
    needed = largest.new_zeros(len(blocks), largest.shape[1])
    needed.scatter_reduce_(0, places[:, None].expand_as(largest), largest, "amax")
    held = scales[blocks].masked_fill_(is_new[:, None], 0.0)
    now = torch.maximum(held, scales_for(needed))
    whole = raw[blocks].view(FLOAT8).float().mul_((held / now)[:, :, None, None])
    whole[places, :, offsets] = rows / now[places][:, :, None]
    raw[blocks] = whole.clamp_(-LARGEST, LARGEST).to(FLOAT8).view(torch.uint8)
    scales[blocks] = now


def dequantised(pages: Tensor, scales: Tensor, blocks: Tensor) -> Tensor:
    """Copy blocks of `pages`, (used,) int64, to float32: (used, num_kv_heads, block_size, head_dim)."""
    held = pages.view(torch.uint8).index_select(0, blocks).view(FLOAT8).float()
    return held.mul_(scales.index_select(0, blocks)[:, :, None, None])
