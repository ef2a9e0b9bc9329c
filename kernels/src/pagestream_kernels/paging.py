"""The paged KV cache as the attention kernels see it: its checks, its geometry and how a reference reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagestream_kernels.checks import FLOAT_DTYPES, check_dtype, check_last_stride, check_shape
from pagestream_kernels.errors import KernelArgumentError

BLOCK_SIZES = (8, 16, 32, 64)
MAX_HEAD_DIM = 256

CACHE_MEANING = "(num_blocks, block_size, num_kv_heads, head_dim)"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that decide how an attention kernel is built."""

    head_dim: int
    group_size: int  # query heads per KV head
    block_size: int  # tokens per cache block
    dtype: torch.dtype


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
    return Geometry(head_dim, num_heads // num_kv_heads, block_size, query.dtype)


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
