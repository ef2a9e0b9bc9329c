"""What a model computes between its matrix products: KV store, attention and operators, for each kind of device."""

from pagestream_engine.attention.backend import Backend
from pagestream_engine.attention.base import AttentionBatch, AttentionSpec, DecodeBatch, DeviceLengths, StepContext
from pagestream_engine.attention.kv_store import CacheShape, KVStore
from pagestream_engine.attention.operators import Angles, HeadNorm, Operators, Rotation
from pagestream_engine.attention.select import prefers_triton, select_backend

__all__ = [
    "Angles",
    "AttentionBatch",
    "AttentionSpec",
    "Backend",
    "CacheShape",
    "DecodeBatch",
    "DeviceLengths",
    "HeadNorm",
    "KVStore",
    "Operators",
    "Rotation",
    "StepContext",
    "prefers_triton",
    "select_backend",
]
