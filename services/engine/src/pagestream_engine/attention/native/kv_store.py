"""The KV store of the C++ kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pagestream_engine.attention.kv_store import CacheShape, KVStore
from pagestream_engine.attention.native.calls import NativeKernels, Write, with_contiguous_heads
from pagestream_engine.attention.operators import Angles, HeadNorm, Rotation


class NativeKVStore(KVStore):
    """Norms, rotates and writes in one pass."""

    def __init__(
        self, shapes: Sequence[CacheShape], device: torch.device, kernels: Mapping[int, NativeKernels]
    ) -> None:
        """`kernels` are by head size."""
        super().__init__(shapes, device)
        self._kernels = kernels

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        key, value = with_contiguous_heads(key), with_contiguous_heads(value)
        to = Write(self.layers[layer], slots, scales=self.scales.get(layer))
        self._kernels[key.shape[2]].rope_and_cache(key, key, value, to)

    def rotates(self, rotation: Rotation, head_dim: int, norm: HeadNorm | None) -> bool:
        return rotation.rotary_dim <= head_dim

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
        query, key, value = with_contiguous_heads(query), with_contiguous_heads(key), with_contiguous_heads(value)
        to = Write(self.layers[layer], slots, angles.positions, angles.rotation, self.scales.get(layer), norm)
        self._kernels[key.shape[2]].rope_and_cache(query, key, value, to)
        return query
