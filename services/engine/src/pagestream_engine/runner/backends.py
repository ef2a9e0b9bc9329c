"""The cache's shape and the backend that a model's layers need."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch

from pagestream_engine.attention import AttentionSpec, Backend, CacheShape, prefers_triton, select_backend
from pagestream_engine.config import DEFAULT_BLOCK_SIZE, TRITON_BLOCK_SIZE, EngineConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.parallel.rank import layers_of_stage
from pagestream_engine.plan import KVLayout, KVSpec, make_layout

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


def kv_layout(specs: Sequence[AttentionSpec], block_size: int, max_model_len: int, num_stages: int = 1) -> KVLayout:
    """Divide the layers into KV groups: all stages have the same block tables, and each the pages of its own layers.

    Raises:
        UnsupportedModel: their caches have sizes that can't share pages.
    """
    kept = [KVSpec(spec.num_kv_heads, spec.head_dim, spec.window) for spec in specs]
    stages = [layers_of_stage(len(kept), stage, num_stages) for stage in range(num_stages)] if num_stages > 1 else ()
    return make_layout(kept, block_size, max_model_len, stages)


def cache_shapes(
    layout: KVLayout, dtype: torch.dtype, kv_cache_dtype: str, own: Container[int] | None = None
) -> list[CacheShape]:
    """Return the shape of each KV group's cache.

    Args:
        kv_cache_dtype: `CacheConfig.kv_cache_dtype`.
        own: the layers of a stage; None: all.
    """
    kept = CACHE_DTYPES[kv_cache_dtype]
    kept = None if kept == dtype else kept
    return [
        CacheShape(
            tuple(layer for layer in group.layers if own is None or layer in own),
            group.spec.num_kv_heads,
            group.spec.head_dim,
            group.block_size,
            dtype,
            kept,
        )
        for group in layout.groups
    ]


class CachePlan(NamedTuple):
    """How keys and values are kept."""

    layout: KVLayout
    """Of all layers: its block tables are those of all stages."""
    shapes: list[CacheShape]
    """Of the layers of one stage."""
    whole_shapes: list[CacheShape]
    """Of all layers in one process."""


def plan_cache(
    specs: Sequence[AttentionSpec], config: EngineConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> CachePlan:
    """Plan the cache of the stage that `config.rank` names.

    Args:
        max_model_len: tokens of the longest sequence.
        device: that computes.

    Raises:
        UnsupportedModel: as `kv_layout`.
    """
    block_size, kept, rank = block_size_for(config, device), config.cache.kv_cache_dtype, config.rank
    whole = kv_layout(specs, block_size, max_model_len)
    whole_shapes = cache_shapes(whole, dtype, kept)
    if rank.num_stages == 1:
        return CachePlan(whole, whole_shapes, whole_shapes)
    layout = kv_layout(specs, block_size, max_model_len, rank.num_stages)
    own = layers_of_stage(len(specs), rank.stage, rank.num_stages)
    return CachePlan(layout, cache_shapes(layout, dtype, kept, own), whole_shapes)


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
