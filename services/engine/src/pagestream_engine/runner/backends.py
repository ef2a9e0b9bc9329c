"""The cache's shape and the backend that a model's layers need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagestream_engine.attention import AttentionSpec, Backend, CacheShape, prefers_triton, select_backend
from pagestream_engine.cache.kv_groups import KVLayout, KVSpec, make_layout
from pagestream_engine.config import DEFAULT_BLOCK_SIZE, TRITON_BLOCK_SIZE, EngineConfig
from pagestream_engine.errors import ConfigError

CACHE_DTYPES = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""By `CacheConfig.kv_cache_dtype`; None is the model's own."""


def block_size_for(config: EngineConfig, device: torch.device) -> int:
    """Tokens a block of the layers that keep most: what the options say, else what suits the backend."""
    if config.cache.block_size is not None:
        return config.cache.block_size
    return TRITON_BLOCK_SIZE if prefers_triton(config.model.attention_backend, device) else DEFAULT_BLOCK_SIZE


def kv_layout(specs: Sequence[AttentionSpec], block_size: int, max_model_len: int) -> KVLayout:
    """Divide the layers into KV groups.

    Raises:
        UnsupportedModel: their caches have sizes that can't share pages.
    """
    kept = [KVSpec(spec.num_kv_heads, spec.head_dim, spec.window) for spec in specs]
    return make_layout(kept, block_size, max_model_len)


def cache_shapes(layout: KVLayout, dtype: torch.dtype, kv_cache_dtype: str) -> list[CacheShape]:
    """Return the shape of each KV group's cache.

    Args:
        layout: of the model's layers.
        dtype: of queries.
        kv_cache_dtype: `CacheConfig.kv_cache_dtype`.
    """
    kept = CACHE_DTYPES[kv_cache_dtype]
    kept = None if kept == dtype else kept
    return [
        CacheShape(group.layers, group.spec.num_kv_heads, group.spec.head_dim, group.block_size, dtype, kept)
        for group in layout.groups
    ]


def backend_for(
    name: str,
    specs: Sequence[AttentionSpec],
    shapes: Sequence[CacheShape],
    device: torch.device,
    *,
    deterministic: bool,
) -> Backend:
    """Choose a backend that runs all layers: where the automatic choice can't, torch's operations.

    Raises:
        ConfigError: the backend that was asked for can't.
    """
    backend = select_backend(name, shapes, device, deterministic=deterministic)
    try:
        for spec in specs:
            backend.attention.check(spec)
    except ConfigError:
        if name != "auto":
            raise
        return select_backend("torch", shapes, device, deterministic=deterministic)
    return backend
