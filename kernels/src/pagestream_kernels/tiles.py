"""How the attention kernels find a tile of keys or values in the paged cache."""

from __future__ import annotations

from pagestream_kernels.runtime import jit, tl


@jit
def aligned(stride: tl.tensor, ALIGNMENT: tl.constexpr) -> tl.tensor:
    """The same stride, as a number that the compiler knows to be a multiple of ALIGNMENT elements."""
    if ALIGNMENT > 1:
        stride = stride // ALIGNMENT * ALIGNMENT
    return stride


@jit
def blocks_of(
    table_ptr: tl.tensor,
    tile: tl.tensor,
    seen: tl.tensor,
    end: tl.tensor,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_KV: tl.constexpr,
) -> tl.tensor:
    """The cache block of a tile, or of each of its tokens where it has several; 0 outside of [seen, end)."""
    if CACHE_BLOCK % BLOCK_KV == 0:
        blocks = tl.load(table_ptr + tile // CACHE_BLOCK, mask=tile < end, other=0)
    else:
        positions = tile + tl.arange(0, BLOCK_KV)
        blocks = tl.load(table_ptr + positions // CACHE_BLOCK, mask=(positions >= seen) & (positions < end), other=0)
    return blocks.to(tl.int64)


@jit
def tile_offsets(
    blocks: tl.tensor,
    tile: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    WIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where a tile begins, and where its tokens (BLOCK_KV,) lie from there: within one page at constant places."""
    tokens = tl.arange(0, BLOCK_KV)
    if WIDE:
        tokens = tokens.to(tl.int64)
    if CACHE_BLOCK == BLOCK_KV:
        begin = blocks * block_stride
        places = tokens * token_stride
    elif CACHE_BLOCK % BLOCK_KV == 0:
        begin = blocks * block_stride + (tile % CACHE_BLOCK + tl.zeros((), tl.int64)) * token_stride
        places = tokens * token_stride
    else:
        begin = 0
        places = blocks * block_stride + (tokens + tile % CACHE_BLOCK) % CACHE_BLOCK * token_stride
    return begin, places
