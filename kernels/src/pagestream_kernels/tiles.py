"""How the attention kernels find tiles of keys and values in the paged cache, and attend to them."""

from __future__ import annotations

from pagestream_kernels.runtime import ieee_dot, jit, soft_capped, tl


@jit
def aligned(stride: tl.tensor, ALIGNMENT: tl.constexpr) -> tl.tensor:
    """The same stride, as a number that the compiler knows to be a multiple of ALIGNMENT elements."""
    if ALIGNMENT > 1:
        stride = stride // ALIGNMENT * ALIGNMENT
    return stride


@jit
def table_of_seq(
    seq: tl.tensor,
    block_tables_ptr: tl.tensor,
    table_rows_ptr: tl.tensor,
    table_stride: tl.tensor,
    HAS_TABLE_ROWS: tl.constexpr,
) -> tl.tensor:
    """Pointer to a sequence's block table: the row that `table_rows_ptr` names, or that of its own number."""
    row = seq.to(tl.int64)
    if HAS_TABLE_ROWS:
        row = tl.load(table_rows_ptr + seq)
    return block_tables_ptr + row * table_stride


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


@jit
def has_nan(accumulator: tl.tensor, row_mask: tl.tensor) -> tl.tensor:
    """Whether one of the rows of `row_mask` has a NaN."""
    is_nan = (accumulator != accumulator) & row_mask[:, None]  # noqa: PLR0124
    return tl.max(tl.max(is_nan.to(tl.int32), axis=1), axis=0) > 0


@jit
def rounded_to_bfloat16(x: tl.tensor) -> tl.tensor:
    """Finite numbers rounded to the nearest of bfloat16, in float32: on the bits, as a cast may cut them off."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@jit
def weighted_sum(
    weights: tl.tensor, values: tl.tensor, value_scale: tl.tensor, UPCAST: tl.constexpr, HAS_SCALES: tl.constexpr
) -> tl.tensor:
    """What a tile adds to the accumulator: its values by their weights, and by their scale."""
    total = ieee_dot(weights.to(values.dtype), values, UPCAST)
    if HAS_SCALES:
        total = total * value_scale
    return total


@jit
def attend_tiles(  # noqa: PLR0912, PLR0915 - one loop is one function
    state: tl.tuple,
    query: tl.tensor,
    row_positions: tl.tensor,
    first_position: tl.tensor,
    columns: tl.tensor,
    cache: tl.tuple,
    strides: tl.tuple,
    bounds: tl.tuple,
    factors: tl.tuple,
    HEAD_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    ROUNDS_SLOPES: tl.constexpr,
    SKIPS_MASKS: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the tiles from `begin` to `end` with rows of one KV head, by an online softmax.

    Args:
        state: maximum and total (rows,), and accumulator (rows, BLOCK_DIM) of the softmax; returned as after the tiles.
        query: (rows, BLOCK_DIM).
        row_positions: (rows,), from `first_position` on. With SKIPS_MASKS, and no window, tiles before it are not
            masked.
        columns: (BLOCK_DIM,).
        cache: pointers to the head's keys, values, their blocks' scales, and the sequence's block table.
        strides: of keys and of values by block, token and element; of the scales by block.
        bounds: begin and end of the tiles, and the first token that a row sees.
        factors: of `score_factors`, the window, and with HAS_SLOPES (rows,) slopes.

    A weight of 0 times an infinite value is a NaN, for a row that does not see the value, too. With IS_EXACT such
    values reach the rows that see them and no others; all else has the same bits as without.

    With HAS_SCALES a tile lies in one block and is of float8; its keys and values are factors of their block's scales.
    The products are of float16. A tile's scale multiplies the sums of its values, and rounds nothing where scales are
    powers of two. Nothing but the scales themselves is carried to the next tile: Triton would not pipeline the loop, or
    would lose the carry (`docs/kernels.md`, "What Triton does").
    """
    maximum, total, accumulator = state
    key_head_ptr, value_head_ptr, key_scales_ptr, value_scales_ptr, table_ptr = cache
    key_stride_b, key_stride_t, key_stride_d, value_stride_b, value_stride_t, value_stride_d, scale_stride = strides
    begin, seen, end = bounds
    score_factor, cap_factor, window, slopes = factors
    column_mask = columns < HEAD_DIM
    # A tile's block is read one tile ahead: keys and values are then one load away, and their copies overlap.
    blocks = blocks_of(table_ptr, begin, seen, end, CACHE_BLOCK, BLOCK_KV)
    key_scale = 1.0
    value_scale = 1.0
    if HAS_SCALES:
        key_scale = tl.load(key_scales_ptr + blocks * scale_stride)
        value_scale = tl.load(value_scales_ptr + blocks * scale_stride)
    for tile in tl.range(begin, end, BLOCK_KV, num_stages=1 if IS_EXACT else None):
        next_blocks = blocks_of(table_ptr, tile + BLOCK_KV, seen, end, CACHE_BLOCK, BLOCK_KV)
        positions = tile + tl.arange(0, BLOCK_KV)

        # -- scores; what a page holds behind the end is read and dropped --
        first, places = tile_offsets(blocks, tile, key_stride_b, key_stride_t, CACHE_BLOCK, BLOCK_KV, WIDE)
        key_ptrs = (key_head_ptr + first) + (places[None, :] + columns[:, None] * key_stride_d)
        if HEAD_DIM == BLOCK_DIM:  # noqa: SIM108
            keys = tl.load(key_ptrs)
        else:
            keys = tl.load(key_ptrs, mask=column_mask[:, None], other=0.0)
        if HAS_SCALES:
            keys = keys.to(tl.float16)
        scores = ieee_dot(query, keys, UPCAST) * (score_factor * key_scale if HAS_SCALES else score_factor)
        if HAS_SOFT_CAP:
            scores = soft_capped(scores, cap_factor)
        if HAS_SLOPES:
            if ROUNDS_SLOPES:
                shares = rounded_to_bfloat16(slopes[:, None] * positions[None, :].to(tl.float32))
            else:
                shares = slopes[:, None] * (positions[None, :] - row_positions[:, None]).to(tl.float32)
            scores += shares * 1.4426950408889634
        if IS_EXACT or not SKIPS_MASKS:
            visible = positions[None, :] <= row_positions[:, None]
            if HAS_WINDOW:
                visible = visible & (positions[None, :] > row_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        elif HAS_WINDOW:
            distances = row_positions[:, None] - positions[None, :]
            scores = tl.where((distances >= 0) & (distances < window), scores, float("-inf"))
        elif tile + BLOCK_KV - 1 > first_position:
            scores = tl.where(positions[None, :] <= row_positions[:, None], scores, float("-inf"))

        # -- online softmax; a row that sees nothing of the tile is unchanged, bit for bit --
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        rescale = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * rescale + tl.sum(weights, axis=1)

        # -- weighted values --
        first, places = tile_offsets(blocks, tile, value_stride_b, value_stride_t, CACHE_BLOCK, BLOCK_KV, WIDE)
        value_ptrs = (value_head_ptr + first) + (places[:, None] + columns[None, :] * value_stride_d)
        value_mask = (positions < end)[:, None]
        if HAS_WINDOW:
            value_mask = value_mask & (positions >= seen)[:, None]
        if HEAD_DIM != BLOCK_DIM:
            value_mask = value_mask & column_mask[None, :]
        if HAS_SCALES:
            # Tokens are neighbours in memory: a mask of them would cut the loads to single bytes.
            if HEAD_DIM == BLOCK_DIM:
                values = tl.load(value_ptrs)
            else:
                values = tl.load(value_ptrs, mask=column_mask[None, :], other=0.0)
            values = values.to(tl.float16)
            if IS_EXACT:
                values = tl.where(value_mask, values, 0.0)
        else:
            values = tl.load(value_ptrs, mask=value_mask, other=0.0)
        accumulator = accumulator * rescale[:, None]
        if IS_EXACT:
            wide = values.to(tl.float32)
            is_nan = wide != wide  # noqa: PLR0124
            is_finite = tl.abs(wide) < float("inf")
            values = tl.where(is_finite, wide, 0.0).to(values.dtype)
            accumulator += weighted_sum(weights, values, value_scale, UPCAST, HAS_SCALES)
            # Per row and column, how many visible values are infinite, negatively so, and no numbers.
            kinds = tl.where(wide == float("inf"), 1.0, tl.where(wide == float("-inf"), 256.0, 0.0))
            counts = tl.dot(visible.to(tl.float16), tl.where(is_nan, 65504.0, kinds).to(tl.float16))
            is_mixed = (counts >= 65504.0) | ((counts > 256.0) & (counts % 256.0 > 0.0))
            bound = tl.where(is_mixed, float("nan"), tl.where(counts >= 256.0, float("-inf"), float("inf")))
            accumulator = tl.where(counts > 0.0, accumulator + bound, accumulator)
        else:
            accumulator += weighted_sum(weights, values, value_scale, UPCAST, HAS_SCALES)
        maximum = new_maximum
        blocks = next_blocks
        if HAS_SCALES:  # at the end, where the block is known
            key_scale = tl.load(key_scales_ptr + blocks * scale_stride)
            value_scale = tl.load(value_scales_ptr + blocks * scale_stride)
    return maximum, total, accumulator
