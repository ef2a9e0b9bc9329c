"""Sampling from logits: temperature, min-p, top-k and top-p by a search for thresholds, then a draw by Gumbel-max."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pagestream_kernels.checks import check_dtype, check_last_stride, check_same_device, check_shape
from pagestream_kernels.errors import KernelArgumentError
from pagestream_kernels.runtime import Variant, jit, kernel, require_launchable, tl

BLOCK = 2048  # logits that a program holds at a time: 8 a thread at 8 warps

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # below 1 in float32: the noise stays finite
_LOWEST = tl.constexpr(-2139095041) if tl is not None else None  # -inf by `_ordered`
_HIGHEST = tl.constexpr(2147483647) if tl is not None else None


@jit
def _mix(z: tl.tensor) -> tl.tensor:
    """The finaliser of splitmix64 (Stafford's mix 13), uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@jit
def _gumbel(state: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """Gumbel noise of token ids, float32: output `column` of the stream that starts at `state`."""
    bits = _mix(state + (columns.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    uniform = ((bits >> 11).to(tl.int64).to(tl.float32) + 0.5) * (1.0 / 9007199254740992.0)
    uniform = tl.minimum(uniform, 1.0 - 1.0 / 16777216.0)
    # log1p(-uniform), exact to a few units in the last place (Goldberg 1991, theorem 4)
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    log1p = tl.where(rest == 1.0, -uniform, tl.log(rest) * tl.div_rn(uniform, lost))
    return -tl.log(-log1p)


@jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """int32 in the order of the floats, equal for both zeros."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _load_scaled(
    row_ptr: tl.tensor, start: tl.tensor, vocab_size: int, temperature: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
    return tl.div_rn(x, temperature)


@jit
def _raise_to_top_k(
    row_ptr: tl.tensor,
    vocab_size: int,
    temperature: tl.tensor,
    largest: tl.tensor,
    floor: tl.tensor,
    top_k: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The k-th largest of what stays above `floor`, or `floor` where fewer stay. Both ends of the search are logits of
    the row, so that it ends where no others lie between them."""
    count = tl.full((), 0, tl.int32)
    low = tl.full((), _HIGHEST, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        keys = _ordered(_load_scaled(row_ptr, start, vocab_size, temperature, BLOCK))
        stays = (keys >= floor) & (keys > _LOWEST)
        count += tl.sum(stays.to(tl.int32))
        low = tl.minimum(low, tl.min(tl.where(stays, keys, _HIGHEST)))
    high = _ordered(largest)
    if count < top_k:
        low = floor
        high = floor
    while low < high:
        # count(>= low) >= k > count(> high)
        middle = (high.to(tl.int64) - (high.to(tl.int64) - low.to(tl.int64)) // 2).to(tl.int32)
        count = tl.full((), 0, tl.int32)
        above = tl.full((), _HIGHEST, tl.int32)
        below = tl.full((), _LOWEST, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            keys = _ordered(_load_scaled(row_ptr, start, vocab_size, temperature, BLOCK))
            is_above = keys >= middle
            count += tl.sum(is_above.to(tl.int32))
            above = tl.minimum(above, tl.min(tl.where(is_above, keys, _HIGHEST)))
            below = tl.maximum(below, tl.max(tl.where(is_above, _LOWEST, keys)))
        if count >= top_k:
            low = above
        else:
            high = below
    return low


@jit
def _raise_to_top_p(
    row_ptr: tl.tensor,
    vocab_size: int,
    temperature: tl.tensor,
    largest: tl.tensor,
    floor: tl.tensor,
    top_p: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The smallest logit of those above `floor` that the larger ones leave below probability `top_p`."""
    sums = tl.zeros((BLOCK,), tl.float32)
    low = tl.full((), _HIGHEST, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        x = _load_scaled(row_ptr, start, vocab_size, temperature, BLOCK)
        keys = _ordered(x)
        stays = (keys >= floor) & (keys > _LOWEST)
        sums += tl.where(stays, tl.exp(x - largest), 0.0)
        low = tl.minimum(low, tl.min(tl.where(stays, keys, _HIGHEST)))
    wanted = top_p * tl.sum(sums)
    high = _ordered(largest)
    while low < high:
        # sum(> high) < wanted, and what is below `low` goes
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low.to(tl.int64)) // 2).to(tl.int32)
        sums = tl.zeros((BLOCK,), tl.float32)
        above = tl.full((), _HIGHEST, tl.int32)
        below = tl.full((), _LOWEST, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            x = _load_scaled(row_ptr, start, vocab_size, temperature, BLOCK)
            keys = _ordered(x)
            is_above = keys > middle
            sums += tl.where(is_above, tl.exp(x - largest), 0.0)
            above = tl.minimum(above, tl.min(tl.where(is_above, keys, _HIGHEST)))
            below = tl.maximum(below, tl.max(tl.where(is_above, _LOWEST, keys)))
        if tl.sum(sums) < wanted:
            high = below
        else:
            low = above
    return tl.maximum(floor, low)


@kernel(
    "token_ids_ptr",
    "values_ptr",
    "logits_ptr",
    "temperatures_ptr",
    "seeds_ptr",
    "positions_ptr",
    "top_k_ptr",
    "top_p_ptr",
    "log_min_p_ptr",
    "logits_stride",
    "vocab_size",
    "has_top_k",
    "has_top_p",
    "has_min_p",
)
def _filter_and_draw_kernel(
    token_ids_ptr: tl.tensor,
    values_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    log_min_p_ptr: tl.tensor,
    logits_stride: tl.tensor,
    vocab_size: int,
    has_top_k: int,
    has_top_p: int,
    has_min_p: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    temperature = tl.load(temperatures_ptr + row)

    # -- the largest logit, and whether there is one that is no number --
    largest = tl.full((), float("-inf"), tl.float32)
    num_nans = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        x = _load_scaled(row_ptr, start, vocab_size, temperature, BLOCK)
        is_nan = x != x  # noqa: PLR0124
        largest = tl.maximum(largest, tl.max(tl.where(is_nan, float("-inf"), x)))
        num_nans += tl.sum(is_nan.to(tl.int32))
    floor = tl.full((), _LOWEST, tl.int32)

    # -- min-p: a floor below which all go --
    if has_min_p != 0:
        floor = tl.maximum(floor, _ordered(largest + tl.load(log_min_p_ptr + row)))

    # -- top-k: raise the floor to the k-th largest --
    top_k = tl.load(top_k_ptr + row * has_top_k)
    if (has_top_k != 0) & (top_k < vocab_size):
        floor = _raise_to_top_k(row_ptr, vocab_size, temperature, largest, floor, top_k, BLOCK)

    # -- top-p: raise it to the last of the nucleus --
    top_p = tl.load(top_p_ptr + row * has_top_p)
    if (has_top_p != 0) & (top_p < 1.0):
        floor = _raise_to_top_p(row_ptr, vocab_size, temperature, largest, floor, top_p, BLOCK)

    # -- draw: the largest of what stays with its noise; of equal ones the lowest id --
    seed = tl.load(seeds_ptr + row).to(tl.uint64)
    position = tl.load(positions_ptr + row).to(tl.uint64)
    state = _mix(_mix(seed + 0x9E3779B97F4A7C15) ^ (position * 0x9E3779B97F4A7C15))
    best = tl.full((), float("-inf"), tl.float32)
    token_id = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _load_scaled(row_ptr, start, vocab_size, temperature, BLOCK)
        noisy = tl.where(_ordered(x) >= floor, x + _gumbel(state, columns), float("-inf"))
        block_best = tl.max(noisy)
        if block_best > best:
            best = block_best
            token_id = tl.min(tl.where(noisy == block_best, columns, vocab_size))
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))
    tl.store(values_ptr + row, tl.where(num_nans > 0, float("nan"), best))


@lru_cache(maxsize=1)
def filter_and_draw_variant() -> Variant:
    """How the kernel is built: in one way, whatever the vocabulary and whichever filters are used."""
    return Variant(
        kernel=_filter_and_draw_kernel,
        signature={
            "token_ids_ptr": "*i64",
            "values_ptr": "*fp32",
            "logits_ptr": "*fp32",
            "temperatures_ptr": "*fp32",
            "seeds_ptr": "*i64",
            "positions_ptr": "*i64",
            "top_k_ptr": "*i64",
            "top_p_ptr": "*fp32",
            "log_min_p_ptr": "*fp32",
            **dict.fromkeys(("logits_stride", "vocab_size", "has_top_k", "has_top_p", "has_min_p"), "i32"),
        },
        constants={"BLOCK": BLOCK},
        num_warps=8,
        num_stages=1,
    )


def filter_and_draw(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row from the softmax of its filtered logits.

    Filters keep all logits at or above a threshold, in the order min-p, top-k, top-p; the thresholds are found by
    bisection between logits of the row, without a sort. The noise is that of splitmix64 from a hash of (seed,
    position), output by token id (Steele, Lea and Flood 2014). A row's token depends on nothing beside the row.

    Args:
        logits: (rows, vocab_size) float32, last dimension contiguous.
        temperatures: (rows,) float32, above 0: logits are divided by them first.
        seeds: (rows,) int64.
        positions: (rows,) int64: index of the token within its output.
        top_k: (rows,) int64, at least 1; vocab_size or more keeps all. None: no row filters so, as with the others.
        top_p: (rows,) float32 in (0, 1]; 1 keeps all.
        min_p: (rows,) float32 in [0, 1]; 0 keeps all.

    Returns:
        The token ids, (rows,) int64, and the sums of logit and noise that they won by, (rows,) float32: NaN where the
        row has one, -inf where it has nothing else; then the token means nothing.

    Raises:
        KernelArgumentError: a wrong shape, dtype, stride or device.
        KernelUnavailableError: no Triton, or no GPU and no interpreter.
    """
    _check(logits, temperatures, seeds, positions, top_k, top_p, min_p)
    require_launchable(logits.device, reference="filter_and_draw_reference")
    num_rows, vocab_size = logits.shape
    token_ids, values = seeds.new_empty(num_rows), temperatures.new_empty(num_rows)
    filter_and_draw_variant().launch(
        (num_rows,),
        {
            "token_ids_ptr": token_ids,
            "values_ptr": values,
            "logits_ptr": logits,
            "temperatures_ptr": temperatures,
            "seeds_ptr": seeds,
            "positions_ptr": positions,
            "top_k_ptr": seeds if top_k is None else top_k,
            "top_p_ptr": temperatures if top_p is None else top_p,
            "log_min_p_ptr": temperatures if min_p is None else min_p.log(),
            "logits_stride": logits.stride(0),
            "vocab_size": vocab_size,
            "has_top_k": int(top_k is not None),
            "has_top_p": int(top_p is not None),
            "has_min_p": int(min_p is not None),
        },
    )
    return token_ids, values


def filter_and_draw_reference(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`filter_and_draw` in torch, by a sort, on any device; same arguments, result and errors."""
    _check(logits, temperatures, seeds, positions, top_k, top_p, min_p)
    scaled = logits / temperatures[:, None]
    if min_p is not None:
        floor = scaled.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    ordered = scaled.sort(dim=-1, descending=True).values
    if top_k is not None:
        border = ordered.gather(1, top_k.clamp(max=logits.shape[-1])[:, None] - 1)
        scaled, ordered = (given.masked_fill(given < border, -torch.inf) for given in (scaled, ordered))
    if top_p is not None:
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        num_kept = ((before < top_p[:, None]) & (ordered > -torch.inf)).sum(dim=-1, keepdim=True).clamp(min=1)
        border = ordered.gather(1, num_kept - 1).masked_fill(top_p[:, None] >= 1.0, -torch.inf)
        scaled = scaled.masked_fill(scaled < border, -torch.inf)
    values, token_ids = (scaled + _noise(seeds, positions, logits.shape[-1])).max(dim=-1)
    return token_ids, values


def _noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """(rows, vocab_size) float32. int64 wraps around as uint64 does."""
    gamma = _GAMMA - (1 << 64)
    state = _mixed(_mixed(seeds + gamma) ^ (positions * gamma))
    columns = torch.arange(1, vocab_size + 1, device=seeds.device)
    bits = _mixed(state[:, None] + columns * gamma)
    uniform = (_shifted(bits, 11).float() + 0.5) * 2.0**-53
    return -torch.log(-torch.log1p(-uniform.clamp(max=_LARGEST_UNIFORM)))


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * (_MIX_1 - (1 << 64))
    z = (z ^ _shifted(z, 27)) * (_MIX_2 - (1 << 64))
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, count: int) -> Tensor:
    return (z >> count) & ((1 << (64 - count)) - 1)


def _check(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> None:
    check_shape("logits", logits, (None, None), meaning="(rows, vocab_size)")
    check_dtype("logits", logits, (torch.float32,))
    if logits.shape[1] == 0:
        raise KernelArgumentError(f"logits: expected at least one token, got shape {tuple(logits.shape)}")
    check_last_stride("logits", logits)
    columns: dict[str, tuple[Tensor | None, torch.dtype]] = {
        "temperatures": (temperatures, torch.float32),
        "seeds": (seeds, torch.int64),
        "positions": (positions, torch.int64),
        "top_k": (top_k, torch.int64),
        "top_p": (top_p, torch.float32),
        "min_p": (min_p, torch.float32),
    }
    for name, (column, dtype) in columns.items():
        if column is not None:
            check_shape(name, column, (logits.shape[0],), meaning="(rows,)")
            check_dtype(name, column, (dtype,))
            if column.stride(0) != 1 and len(column) > 1:
                raise KernelArgumentError(f"{name}: expected stride 1, got {column.stride(0)}")
    check_same_device(("logits", logits), *((name, column) for name, (column, _) in columns.items()))
