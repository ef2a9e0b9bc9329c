"""The KV store of the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pagestream_kernels as kernels
import torch
from torch import Tensor

from pagestream_engine.attention.kv_store import CacheShape, KVStore
from pagestream_engine.attention.operators import Angles, HeadNorm, Rotation
from pagestream_engine.transfers import to_device


class TritonKVStore(KVStore):
    """Norms, rotates and writes in one pass, and copies blocks of all layers in one launch. Values of float8 lie
    transposed in their pages."""

    def __init__(self, shapes: Sequence[CacheShape], device: torch.device) -> None:
        super().__init__(shapes, device)
        self._still: Rotation | None = None
        if self.has_scales:  # made here: a recorded step sends nothing from the host
            self._still = Rotation(torch.tensor([[1.0, 0.0]], device=device))

    def _view_values(self, pages: Tensor, shape: CacheShape) -> Tensor:
        if not shape.has_scales:
            return super()._view_values(pages, shape)
        return pages.view(len(pages), shape.num_kv_heads, shape.head_dim, shape.block_size).transpose(2, 3)

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        if self._still is None:
            super().write(layer, key, value, slots)
            return
        # The kernel that quantises turns on its way: by no angle, and a query that nobody reads.
        key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
        self._quantise(layer, (key.clone(), key, value), slots, Angles(self._still, torch.zeros_like(slots)))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = zip(*copies, strict=True)
        if not set(sources).isdisjoint(targets):  # the kernel reads and writes at once
            super().copy_blocks(copies)
            return
        pairs = to_device(torch.tensor(copies), self.device)
        for part in self.parts:
            layers = part.flatten(0, 1)
            kernels.copy_blocks(layers, layers, pairs)

    def rotates(self, rotation: Rotation, head_dim: int, norm: HeadNorm | None) -> bool:
        # The kernels multiply by weights of the heads' dtype alone.
        return rotation.rotary_dim <= head_dim and (norm is None or norm.query_weight.dtype == self.dtype)

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
        # The kernels name the token's dimension before the head's.
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        if self.has_scales:
            self._quantise(layer, (query, key, value), slots, angles, norm)
            return query
        keys, values = (cache.transpose(1, 2) for cache in self.layers[layer])
        rotation = angles.rotation
        kernels.rope_and_cache(
            *(query, key, value, rotation.cos_sin, angles.positions, keys, values, slots),
            norm=_norm_of(norm),
            interleaved=rotation.interleaved,
        )
        return query

    def _quantise(
        self,
        layer: int,
        rows: tuple[Tensor, Tensor, Tensor],
        slots: Tensor,
        angles: Angles,
        norm: HeadNorm | None = None,
    ) -> None:
        keys, values = (cache.transpose(1, 2) for cache in self.layers[layer])
        rotation = angles.rotation
        kernels.rope_and_quantise(
            *rows,
            rotation.cos_sin,
            angles.positions,
            keys,
            values,
            *self.scales[layer],
            slots,
            norm=_norm_of(norm),
            interleaved=rotation.interleaved,
        )


def _norm_of(norm: HeadNorm | None) -> kernels.HeadNorm | None:
    """Return a norm as the kernels take it."""
    return None if norm is None else kernels.HeadNorm(norm.query_weight, norm.key_weight, norm.eps)
