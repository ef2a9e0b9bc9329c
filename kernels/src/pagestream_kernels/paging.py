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


def check_cache(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Geometry:
    """Check the query (tokens, num_heads, head_dim) against both caches and return their geometry."""
    check_dtype("query", query, FLOAT_DTYPES)
    check_shape("query", query, (None, None, None), meaning="(tokens, num_heads, head_dim)")
    check_last_stride("query", query)
    num_heads, head_dim = query.shape[1], query.shape[2]
    check_shape("key_cache", key_cache, (None, None, None, head_dim), meaning=CACHE_MEANING)
    check_shape("value_cache", value_cache, tuple(key_cache.shape), meaning=CACHE_MEANING)
    check_dtype("key_cache", key_cache, (query.dtype,))
    check_dtype("value_cache", value_cache, (query.dtype,))
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise KernelArgumentError(f"head_dim: expected 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if block_size not in BLOCK_SIZES:
        raise KernelArgumentError(f"block_size: expected one of {BLOCK_SIZES}, got {block_size}")
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise KernelArgumentError(f"num_heads: expected a multiple of num_kv_heads={num_kv_heads}, got {num_heads}")
    farthest = max(
        (block_size - 1) * cache.stride(1) + (head_dim - 1) * cache.stride(3) for cache in (key_cache, value_cache)
    )
    strides = [stride for cache in (key_cache, value_cache) for stride in cache.stride()[:3]]
    alignment = math.gcd(MAX_ALIGNMENT, *strides)
    return Geometry(head_dim, num_heads // num_kv_heads, block_size, query.dtype, alignment, farthest >= 2**31)


class Options(NamedTuple):
    """Which options of attention a kernel is built with; their values are arguments of a launch."""

    window: bool = False
    soft_cap: bool = False
    sinks: bool = False


def check_options(window: int | None, soft_cap: float | None, sinks: Tensor | None, num_heads: int) -> Options:
    """Check the options of attention, and return which of them are given."""
    if window is not None and window < 1:
        raise KernelArgumentError(f"window: expected at least 1 token, got {window}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise KernelArgumentError(f"soft_cap: expected a finite number > 0, got {soft_cap}")
    if sinks is not None:
        check_dtype("sinks", sinks, (torch.float32,))
        check_shape("sinks", sinks, (num_heads,), meaning="(num_heads,)")
        check_last_stride("sinks", sinks)
    return Options(window is not None, soft_cap is not None, sinks is not None)


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Factors of a product of query and key before and after the soft cap's tanh; scores are logarithms to base 2."""
    return (scale * LOG2_E, 1.0) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2_E)


def check_tables(block_tables: Tensor, seq_lens: Tensor, num_seqs: int) -> None:
    """Check the block tables (num_seqs, max_blocks) and lengths (num_seqs,), both int32."""
    check_dtype("block_tables", block_tables, (torch.int32,))
    check_shape("block_tables", block_tables, (num_seqs, None), meaning="(num_seqs, max_blocks)")
    check_last_stride("block_tables", block_tables)
    check_dtype("seq_lens", seq_lens, (torch.int32,))
    check_shape("seq_lens", seq_lens, (num_seqs,), meaning="(num_seqs,)")
    check_last_stride("seq_lens", seq_lens)


def gather_cache(cache: Tensor, block_tables: Tensor) -> Tensor:
    """Copy the cached rows of every sequence: (num_seqs, max_blocks * block_size, num_kv_heads, head_dim).

    Entries of the table beyond a sequence's length may hold anything (-1 too); their rows are those of block 0.
    """
    valid = (block_tables >= 0) & (block_tables < cache.shape[0])
    rows = cache[torch.where(valid, block_tables, 0).long()]
    return rows.flatten(1, 2)


def capped_reference(scores: Tensor, soft_cap: float | None) -> Tensor:
    """Scores bounded by a soft cap."""
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def softmax_reference(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension; `sinks` (its other dimensions, or the last of them) are one score more."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    with_sinks = torch.cat((scores, sinks.expand(scores.shape[:-1]).unsqueeze(-1)), dim=-1)
    return torch.softmax(with_sinks, dim=-1)[..., :-1]
