"""The tensors of the paged KV cache: written by slot, copied by block, viewed by layer."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagestream_engine.attention.operators import Angles, Rotation
from pagestream_engine.transfers import to_device


@dataclass(frozen=True)
class CacheShape:
    """The cache of a KV group: of each of its layers keys and values, (num_blocks, num_kv_heads, block_size, head_dim)
    each.
    """

    layers: tuple[int, ...]
    """Indices of the group's layers in the model."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block."""
    dtype: torch.dtype

    @property
    def page_size(self) -> int:
        """Elements of one block's keys, or values, in one layer."""
        return self.num_kv_heads * self.head_dim * self.block_size


class LayerCache(NamedTuple):
    """One layer's cache."""

    keys: Tensor
    """(num_blocks, num_kv_heads, block_size, head_dim); a block is contiguous."""
    values: Tensor
    """As `keys`."""


class KVStore:
    """Owns the cache. KV groups share its blocks: layer i of each group lies in the same storage, whose pages are as
    large as the largest group's, and which each group views in its own shape from the page's beginning.

    A slot is written before any query reads it. What has not been written is undefined and may be NaN.
    """

    def __init__(self, shapes: Sequence[CacheShape], device: torch.device) -> None:
        """Raise ValueError for groups whose dtypes differ.

        Args:
            shapes: of each KV group.
            device: where the cache lies.
        """
        dtypes = {shape.dtype for shape in shapes}
        if len(dtypes) != 1:
            raise ValueError(f"KV groups: given dtypes {dtypes}, expected one")
        self.shapes = tuple(shapes)
        self.group_of = {layer: group for group, shape in enumerate(shapes) for layer in shape.layers}
        """Of each layer the index of its KV group."""
        self.dtype = shapes[0].dtype
        self.device = device
        self.layers: dict[int, LayerCache] = {}
        self.cache = torch.empty(0, dtype=self.dtype, device=device)
        """(2, layers of the largest group, num_blocks, page_size): keys, then values."""

    @property
    def num_slots(self) -> int:
        """Layers of the largest group."""
        return max(len(shape.layers) for shape in self.shapes)

    @property
    def page_size(self) -> int:
        """Elements of a page's keys, or values, in one layer."""
        return max(shape.page_size for shape in self.shapes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a group, keys and values."""
        return 2 * self.num_slots * self.page_size * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Allocate the cache of all layers; its content is undefined."""
        size = (2, self.num_slots, num_blocks, self.page_size)
        if self.device.type == "cpu":
            self.cache = host_tensor(size, self.dtype)
        else:
            self.cache = torch.empty(size, dtype=self.dtype, device=self.device)
        for shape in self.shapes:
            block = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
            for slot, layer in enumerate(shape.layers):
                keys, values = (half[slot, :, : shape.page_size].view(block) for half in self.cache)
                self.layers[layer] = LayerCache(keys, values)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of blocks in all layers: pairs of source and target, no target twice.

        All sources are read before a target is written.
        """
        sources, targets = to_device(torch.tensor(copies), self.device).unbind(1)
        self.cache.index_copy_(2, targets, self.cache.index_select(2, sources))

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write keys and values of a layer.

        Args:
            layer: index of the layer.
            key: (tokens, num_kv_heads, head_dim).
            value: as `key`.
            slots: (tokens,) int64: block * block_size + offset.
        """
        cache = self.layers[layer]
        size = cache.keys.shape[2]
        blocks, offsets = slots // size, slots % size
        cache.keys[blocks, :, offsets] = key
        cache.values[blocks, :, offsets] = value

    def rotates(self, rotation: Rotation, head_dim: int) -> bool:
        """Whether `rotate_and_write` is available for a rotation of heads of a size."""
        return False

    def rotate_and_write(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, slots: Tensor, angles: Angles
    ) -> Tensor:
        """Rotate query and key, and write key and value, in one pass over them.

        Args:
            layer: index of the layer.
            query: (tokens, num_heads, head_dim), overwritten.
            key: (tokens, num_kv_heads, head_dim).
            value: as `key`.
            slots: (tokens,) int64.
            angles: of a rotation that this store `rotates`.

        Returns:
            The rotated query, in its own storage where its layout allows.
        """
        raise NotImplementedError("this store does not rotate")


def host_tensor(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose pages come into being when they are first touched, in 2 MiB pages where Linux has them.

    A decode step reads blocks from all over the pool: with 4 KiB pages it took 29 ms, with large ones 21 (64 sequences
    of the reference workload, one core of an EPYC with AVX-512), the difference being address translation.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    # Private: a shared mapping, which is Python's default, gets large pages only where the system is told so.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without them refuses: small pages do.
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive, and its end unmaps it.
    return torch.frombuffer(pages, dtype=dtype).view(size)
