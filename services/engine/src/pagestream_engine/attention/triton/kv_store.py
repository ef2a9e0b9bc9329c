"""The KV store of the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pagestream_kernels as kernels
import torch
from torch import Tensor

from pagestream_engine.attention.kv_store import KVStore
from pagestream_engine.attention.operators import Angles, Rotation
from pagestream_engine.transfers import to_device


class TritonKVStore(KVStore):
    """Rotates and writes in one pass, and copies blocks of all layers in one launch."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = zip(*copies, strict=True)
        if not set(sources).isdisjoint(targets):  # the kernel reads and writes at once
            super().copy_blocks(copies)
            return
        layers = self.cache.flatten(0, 1)
        kernels.copy_blocks(layers, layers, to_device(torch.tensor(copies), self.device))

    def rotates(self, rotation: Rotation, head_dim: int) -> bool:
        return not rotation.interleaved and rotation.rotary_dim <= head_dim

    def rotate_and_write(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, slots: Tensor, angles: Angles
    ) -> Tensor:
        # The kernels name the token's dimension before the head's.
        keys, values = (cache.transpose(1, 2) for cache in self.layers[layer])
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        kernels.rope_and_cache(query, key, value, angles.rotation.cos_sin, angles.positions, keys, values, slots)
        return query
