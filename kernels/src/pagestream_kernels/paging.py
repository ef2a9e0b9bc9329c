"""The paged KV cache as the attention kernels see it: its checks, its geometry and how a reference reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagestream_kernels.checks import FLOAT_DTYPES, check_dtype, check_last_stride, check_shape
from pagestream_kernels.errors import KernelArgumentError

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
FLOAT8 = torch.float8_e4m3fn
FLOAT8_BLOCK_SIZES = (64, 128, 256)  # a tile has one scale
MAX_HEAD_DIM = 256
MAX_ALIGNMENT = 16  # elements: a stride that is a multiple of it allows the widest loads
WIDE_ALIGNMENT = 8  # elements: below it rows are loaded in pieces, whose addresses fill the registers of a large tile

LOG2_E = math.log2(math.e)

CACHE_MEANING = "(num_blocks, block_size, num_kv_heads, head_dim)"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that decide how an attention kernel is built."""

    head_dim: int
    group_size: int  # query heads per KV head
    block_size: int  # tokens per cache block
    dtype: torch.dtype
    alignment: int = MAX_ALIGNMENT  # elements: the largest power of two that divides the cache's strides
    is_wide: bool = False  # offsets within a block, or within a tile of rows, pass 31 bits
    has_scales: bool = False  # the cache is of float8, each block and KV head with a scale

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values in the cache; `dtype` is the query's."""
        return FLOAT8 if self.has_scales else self.dtype

    @property
    def unit_strides(self) -> tuple[str, str]:
        """The strides that usual layouts have as 1: values of float8 are transposed within their page."""
        return "key_stride_d", "value_stride_t" if self.has_scales else "value_stride_d"


def check_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Geometry:
    """Check the query (tokens, num_heads, head_dim) against both caches and return their geometry."""
    check_dtype("query", query, FLOAT_DTYPES)
    check_shape("query", query, (None, None, None), meaning="(tokens, num_heads, head_dim)")
    check_last_stride("query", query)
    num_heads, head_dim = query.shape[1], query.shape[2]
    check_shape("key_cache", key_cache, (None, None, None, head_dim), meaning=CACHE_MEANING)
    check_shape("value_cache", value_cache, tuple(key_cache.shape), meaning=CACHE_MEANING)
    has_scales = key_scales is not None or value_scales is not None
    cache_dtype = FLOAT8 if has_scales else query.dtype
    check_dtype("key_cache", key_cache, (cache_dtype,))
    check_dtype("value_cache", value_cache, (cache_dtype,))
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise KernelArgumentError(f"head_dim: expected 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if block_size not in BLOCK_SIZES:
        raise KernelArgumentError(f"block_size: expected one of {BLOCK_SIZES}, got {block_size}")
    if has_scales:
        if block_size not in FLOAT8_BLOCK_SIZES:
            raise KernelArgumentError(
                f"block_size: expected one of {FLOAT8_BLOCK_SIZES} for a cache of {FLOAT8}, got {block_size}"
            )
        check_scales("key_scales", key_scales, key_cache)
        check_scales("value_scales", value_scales, key_cache)
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise KernelArgumentError(f"num_heads: expected a multiple of num_kv_heads={num_kv_heads}, got {num_heads}")
    farthest = max(
        (block_size - 1) * cache.stride(1) + (head_dim - 1) * cache.stride(3) for cache in (key_cache, value_cache)
    )
    strides = [stride for cache in (key_cache, value_cache) for stride in cache.stride()[:3]]
    if has_scales and value_cache.stride(1) == 1:
        strides = [*key_cache.stride()[:3], *(value_cache.stride(axis) for axis in (0, 2, 3))]
    alignment = math.gcd(MAX_ALIGNMENT, *strides)
    group_size = num_heads // num_kv_heads
    return Geometry(head_dim, group_size, block_size, query.dtype, alignment, farthest >= 2**31, has_scales)


def check_scales(name: str, scales: Tensor | None, cache: Tensor) -> None:
    """Check the scales (num_blocks, num_kv_heads), float32, of a float8 cache; both have the same strides."""
    if scales is None:
        raise KernelArgumentError(f"{name}: expected a torch.Tensor for a cache of {FLOAT8}, got None")
    check_dtype(name, scales, (torch.float32,))
    check_shape(name, scales, (cache.shape[0], cache.shape[2]), meaning="(num_blocks, num_kv_heads)")
    if not scales.is_contiguous():
        raise KernelArgumentError(f"{name}: expected a contiguous tensor, got strides {scales.stride()}")


def scale_strides(scales: Tensor | None) -> dict[str, int]:
    """The arguments of a launch for the strides of `scales`."""
    return (
        {"scale_stride": 0, "scale_stride_h": 0}
        if scales is None
        else {"scale_stride": scales.stride(0), "scale_stride_h": scales.stride(1)}
    )


class Options(NamedTuple):
    """Which options of attention a kernel is built with; their values are arguments of a launch."""

    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    slopes: bool = False
    rounds_slopes: bool = False


def check_options(
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    num_heads: int,
    slopes: Tensor | None = None,
    *,
    rounds_slopes: bool = False,
) -> Options:
    """Check the options of attention, and return which of them are given."""
    if window is not None and window < 1:
        raise KernelArgumentError(f"window: expected at least 1 token, got {window}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise KernelArgumentError(f"soft_cap: expected a finite number > 0, got {soft_cap}")
    for name, given in (("sinks", sinks), ("slopes", slopes)):
        if given is not None:
            check_dtype(name, given, (torch.float32,))
            check_shape(name, given, (num_heads,), meaning="(num_heads,)")
            check_last_stride(name, given)
    return Options(window is not None, soft_cap is not None, sinks is not None, slopes is not None, rounds_slopes)


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Factors of a product of query and key before and after the soft cap's tanh; scores are logarithms to base 2."""
    return (scale * LOG2_E, 1.0) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2_E)


def check_tables(block_tables: Tensor, table_rows: Tensor | None, seq_lens: Tensor, num_seqs: int) -> None:
    """Check the block tables (num_seqs, max_blocks) and lengths (num_seqs,), both int32; with `table_rows` (num_seqs,)
    int64 the tables have any number of rows."""
    check_dtype("block_tables", block_tables, (torch.int32,))
    num_rows = num_seqs if table_rows is None else None
    check_shape("block_tables", block_tables, (num_rows, None), meaning="(num_seqs, max_blocks)")
    if table_rows is not None:
        check_dtype("table_rows", table_rows, (torch.int64,))
        check_shape("table_rows", table_rows, (num_seqs,), meaning="(num_seqs,)")
        check_last_stride("table_rows", table_rows)
    check_last_stride("block_tables", block_tables)
    check_dtype("seq_lens", seq_lens, (torch.int32,))
    check_shape("seq_lens", seq_lens, (num_seqs,), meaning="(num_seqs,)")
    check_last_stride("seq_lens", seq_lens)


def gather_cache(cache: Tensor, block_tables: Tensor, scales: Tensor | None = None) -> Tensor:
    """Copy the cached rows of every sequence: (num_seqs, max_blocks * block_size, num_kv_heads, head_dim), float32.

    Entries of the table beyond a sequence's length may hold anything (-1 too); their rows are those of block 0.
    """
    valid = (block_tables >= 0) & (block_tables < cache.shape[0])
    blocks = torch.where(valid, block_tables, 0).long()
    if scales is None:
        return cache[blocks].float().flatten(1, 2)
    rows = cache.view(torch.uint8)[blocks].view(cache.dtype).float()
    return (rows * scales[blocks][:, :, None, :, None]).flatten(1, 2)


def capped_reference(scores: Tensor, soft_cap: float | None) -> Tensor:
    """Scores bounded by a soft cap."""
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def softmax_reference(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension; `sinks` (its other dimensions, or the last of them) are one score more."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    with_sinks = torch.cat((scores, sinks.expand(scores.shape[:-1]).unsqueeze(-1)), dim=-1)
    return torch.softmax(with_sinks, dim=-1)[..., :-1]
