"""What a model computes between its matrix products: KV store, attention and operators, for each kind of device."""

from pagestream_engine.attention.base import (
    Activation,
    Angles,
    AttentionBatch,
    AttentionSpec,
    Backend,
    CacheShape,
    DecodeBatch,
    DeviceLengths,
    HeadNorm,
    KVStore,
    Operators,
    PagedAttention,
    Rotation,
    StepContext,
)
from pagestream_engine.attention.select import prefers_triton, select_backend

__all__ = [
    "Activation",
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
    "PagedAttention",
    "Rotation",
    "StepContext",
    "prefers_triton",
    "select_backend",
]
