"""The KV store of the Triton kernels."""

from __future__ import annotations

import pagestream_kernels as kernels
from torch import Tensor

from pagestream_engine.attention.kv_store import KVStore
from pagestream_engine.attention.operators import Angles, Rotation


class TritonKVStore(KVStore):
    """Rotates and writes in one pass."""

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
