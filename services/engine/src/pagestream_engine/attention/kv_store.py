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

from pagestream_engine.attention.float8 import FLOAT8, dequantised, write_scaled
from pagestream_engine.attention.operators import Angles, HeadNorm, Rotation
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
    """Of queries, and of keys and values as attention computes with them."""
    cache_dtype: torch.dtype | None = None
    """What keys and values are kept as; None: `dtype`. With float8_e4m3fn each block and KV head has a scale for its
    keys and one for its values."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """What keys and values are kept as."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype

    @property
    def has_scales(self) -> bool:
        """Whether blocks have scales."""
        return self.stored_dtype == FLOAT8

    @property
    def page_size(self) -> int:
        """Elements of one block's keys, or values, in one layer."""
        return self.num_kv_heads * self.head_dim * self.block_size


def block_bytes(shapes: Sequence[CacheShape]) -> int:
    """Return the bytes of a block over all layers of a group: keys and values, with their scales."""
    num_slots = max(len(shape.layers) for shape in shapes)
    page_size, num_scales = _largest_page(shapes)
    return 2 * num_slots * (page_size * shapes[0].stored_dtype.itemsize + num_scales * torch.float32.itemsize)


def _largest_page(shapes: Sequence[CacheShape]) -> tuple[int, int]:
    """Elements, and scales, of the largest group's keys, or values, of a block in one layer."""
    return max(shape.page_size for shape in shapes), max(shape.has_scales * shape.num_kv_heads for shape in shapes)


class LayerCache(NamedTuple):
    """One layer's cache."""

    keys: Tensor
    """(num_blocks, num_kv_heads, block_size, head_dim); a block is contiguous."""
    values: Tensor
    """As `keys`."""


class LayerScales(NamedTuple):
    """The scales of one layer's cache: an element stands for itself times its block's and head's."""

    keys: Tensor
    """(num_blocks, num_kv_heads) float32, rows as far apart as those of the group with most heads."""
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
        dtypes = {(shape.dtype, shape.cache_dtype) for shape in shapes}
        if len(dtypes) != 1:
            raise ValueError(f"KV groups: given dtypes {dtypes}, expected one")
        self.shapes = tuple(shapes)
        self.group_of = {layer: group for group, shape in enumerate(shapes) for layer in shape.layers}
        """Of each layer the index of its KV group."""
        self.dtype, self.stored_dtype = shapes[0].dtype, shapes[0].stored_dtype
        self.has_scales = shapes[0].has_scales
        self.device = device
        self.layers: dict[int, LayerCache] = {}
        self.scales: dict[int, LayerScales] = {}
        """Of each layer, where there are scales."""
        self.parts: tuple[Tensor, ...] = ()
        """What a block consists of, (2, layers of the largest group, num_blocks, ...) each: elements of keys and
        values, and their scales, if any. With `attach` those of the other store follow."""
        self._attached: KVStore | None = None

    def attach(self, other: KVStore) -> None:
        """Let each block have a page of another store too, a draft model's: both are allocated, copied and kept in host
        memory as one. Before `allocate`."""
        self._attached = other

    @property
    def num_slots(self) -> int:
        """Layers of the largest group."""
        return max(len(shape.layers) for shape in self.shapes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a group, keys and values, and of its page in an attached store."""
        return block_bytes(self.shapes) + (0 if self._attached is None else self._attached.block_bytes)

    @property
    def cache(self) -> Tensor:
        """(2, layers of the largest group, num_blocks, elements of a page): keys, then values; bytes of float8."""
        return self.parts[0]

    def allocate(self, num_blocks: int) -> None:
        """Allocate the cache of all layers; its content is undefined."""
        page_size, num_scales = _largest_page(self.shapes)
        size = (2, self.num_slots, num_blocks)
        elements = self._allocate((*size, page_size), torch.uint8 if self.has_scales else self.stored_dtype)
        self.parts = (elements,)
        if self.has_scales:
            self.parts = (elements, self._allocate((*size, num_scales), torch.float32))
        for shape in self.shapes:
            for slot, layer in enumerate(shape.layers):
                keys, values = (half[slot, :, : shape.page_size].view(self.stored_dtype) for half in elements)
                block = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
                self.layers[layer] = LayerCache(keys.view(block), self._view_values(values, shape))
                if self.has_scales:
                    self.scales[layer] = LayerScales(*(half[slot, :, : shape.num_kv_heads] for half in self.parts[-1]))
        if self._attached is not None:
            self._attached.allocate(num_blocks)
            self.parts += self._attached.parts

    def release(self) -> None:
        """Free the cache of all layers, until `allocate`."""
        self.layers.clear()
        self.scales.clear()
        self.parts = ()
        if self._attached is not None:
            self._attached.release()

    def _view_values(self, pages: Tensor, shape: CacheShape) -> Tensor:
        """View (num_blocks, page_size) as `LayerCache.values`."""
        return pages.view(len(pages), shape.num_kv_heads, shape.block_size, shape.head_dim)

    def _allocate(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device.type == "cpu":
            return host_tensor(size, dtype)
        # Undefined until written, maybe NaN, and 0 * NaN is NaN: attention must not read what no query sees.
        return torch.empty(size, dtype=dtype, device=self.device)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of blocks in all layers: pairs of source and target, no target twice.

        All sources are read before a target is written.
        """
        sources, targets = to_device(torch.tensor(copies), self.device).unbind(1)
        for part in self.parts:
            part.index_copy_(2, targets, part.index_select(2, sources))

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write keys and values of a layer.

        Where there are scales, a step's tokens of one block are neighbours, in slots that follow each other, and the
        tokens of a block are written from its first slot on: that one takes the block anew.

        Args:
            key: (tokens, num_kv_heads, head_dim).
            value: as `key`.
            slots: (tokens,) int64: block * block_size + offset.
        """
        cache = self.layers[layer]
        if self.has_scales:
            for pages, scales, rows in zip(cache, self.scales[layer], (key, value), strict=True):
                write_scaled(pages, scales, rows, slots)
            return
        size = cache.keys.shape[2]
        blocks, offsets = slots // size, slots % size
        cache.keys[blocks, :, offsets] = key.to(self.stored_dtype)
        cache.values[blocks, :, offsets] = value.to(self.stored_dtype)

    def gather(self, layer: int, blocks: Tensor) -> LayerCache:
        """Copy blocks of a layer, (used,) int64, to tensors of `dtype`: their first dimension is `used`."""
        cache = self.layers[layer]
        if self.has_scales:
            pairs = zip(cache, self.scales[layer], strict=True)
            return LayerCache(*(dequantised(pages, scales, blocks).to(self.dtype) for pages, scales in pairs))
        return LayerCache(*(pages.index_select(0, blocks).to(self.dtype) for pages in cache))

    def rotates(self, rotation: Rotation, head_dim: int, norm: HeadNorm | None) -> bool:
        """Whether `rotate_and_write` is available for a rotation of heads of a size, with a norm before it."""
        return False

    def rotate_and_write(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        slots: Tensor,
        angles: Angles,
        norm: HeadNorm | None,
    ) -> Tensor:
        """Norm and rotate query and key, and write key and value, in one pass over them.

        Args:
            query: (tokens, num_heads, head_dim), overwritten.
            key: (tokens, num_kv_heads, head_dim).
            value: as `key`.
            slots: (tokens,) int64.
            angles: of a rotation that this store `rotates`.
            norm: before the rotation, or None.

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
