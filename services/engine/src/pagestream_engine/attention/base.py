"""What a model asks of the machine between its matrix products: attention over the paged cache, and the small steps."""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step's packed tokens: the chunks of all prefills, then one token of each decode.

    The keys and values of a sequence's first `seq_len - query_len` tokens are in the cache already.
    """

    positions: Tensor
    """(tokens,) int64: place of each token in its sequence."""
    slots: Tensor
    """(tokens,) int64: where its key and value go, block * block_size + offset."""
    block_tables: Tensor
    """(sequences, most blocks) int32, padded with 0."""
    query_lens: list[int]
    """New tokens of each sequence; 1 for decodes."""
    seq_lens: list[int]
    """Tokens of each sequence, the new ones included."""
    num_prefills: int
    """Leading sequences that are prefills."""

    @property
    def num_prefill_tokens(self) -> int:
        """Leading tokens that belong to prefills."""
        return sum(self.query_lens[: self.num_prefills])


@dataclass(frozen=True)
class CacheShape:
    """One layer's cache, keys and values each (num_blocks, num_kv_heads, block_size, head_dim)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block."""
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size * self.dtype.itemsize


PlanT = TypeVar("PlanT")


class AttentionBackend(ABC, Generic[PlanT]):
    """Owns the KV cache, and knows the fastest way over it on one kind of device.

    A cache slot is written once, by `attend`, before any query reads it; a backend never reads past a sequence's
    length, so that what a block held before is never seen. `PlanT` is what all layers of a step share.
    """

    is_exact: ClassVar[bool] = False
    """Whether a token's results have the same bits in any batch, in any chunk of its prompt, and as a decode."""

    def __init__(self, shape: CacheShape, cos_sin: Tensor) -> None:
        """`cos_sin` is (positions, head_dim) float32: cosines, then sines, of each position's angles."""
        self.shape = shape
        self.cos_sin = cos_sin
        self.device = cos_sin.device
        self.scale = shape.head_dim**-0.5
        self.key_cache: list[Tensor] = []
        self.value_cache: list[Tensor] = []
        self._cache = cos_sin.new_empty(0)

    def allocate(self, num_blocks: int) -> None:
        """Allocate the cache of all layers, zeroed: what a backend reads and then masks must be finite."""
        shape = self.shape
        size = (2, shape.num_layers, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        if self.device.type == "cpu":
            cache = _host_zeros(size, shape.dtype)
        else:
            cache = torch.zeros(size, dtype=shape.dtype, device=self.device)
        self._cache = cache
        keys, values = cache.unbind(0)
        self.key_cache, self.value_cache = list(keys.unbind(0)), list(values.unbind(0))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of blocks in all layers: pairs of source and target, no target twice.

        All sources are read before a target is written.
        """
        sources, targets = torch.tensor(copies, device=self.device).unbind(1)
        self._cache.index_copy_(2, targets, self._cache.index_select(2, sources))

    @property
    def kernel_version(self) -> str:
        """Name of the build that computes beside torch; another one may give other bits. Empty without such a build."""
        return ""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> PlanT:
        """Prepare, once a step, what every layer needs."""

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: PlanT) -> Tensor:
        """Rotate query and key, write key and value to their slots, and attend causally.

        Args:
            layer: index of the layer.
            query: (tokens, num_heads, head_dim), may be overwritten.
            key: (tokens, num_kv_heads, head_dim), may be overwritten.
            value: (tokens, num_kv_heads, head_dim).
            plan: of this step's batch.

        Returns:
            (tokens, num_heads * head_dim), in the packed order.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum; both arguments may be overwritten."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """(tokens, 2 * d) -> (tokens, d): silu of the first half times the second."""


def _host_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor whose pages come into being when they are first touched, in 2 MiB pages where Linux has them.

    A decode step reads blocks from all over the pool: with 4 KiB pages it took 29 ms, with large ones 21 (64 sequences
    of the reference workload, one core of an EPYC with AVX-512), the difference being address translation.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without them refuses: small pages do.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive, and its end unmaps it.
    return torch.frombuffer(pages, dtype=dtype).view(size)
