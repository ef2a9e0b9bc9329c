"""The block pool, its prefix cache, and what holds them together."""

from pagestream_engine.kv_cache.block_pool import BlockPool, FreeList, make_eviction_order
from pagestream_engine.kv_cache.host_tier import HostTier
from pagestream_engine.kv_cache.inspection import check_cache
from pagestream_engine.kv_cache.manager import BlockHasher, CachedPrefix, CacheManager
from pagestream_engine.plan import (
    MAX_PADDING,
    NO_BLOCK,
    TO_LOAD,
    HostMemory,
    KVGroup,
    KVLayout,
    KVSpec,
    full_attention,
    make_layout,
)
from pagestream_engine.stats import CACHED, FREE, HELD, BlockMap

__all__ = [
    "CACHED",
    "FREE",
    "HELD",
    "MAX_PADDING",
    "NO_BLOCK",
    "TO_LOAD",
    "BlockHasher",
    "BlockMap",
    "BlockPool",
    "CacheManager",
    "CachedPrefix",
    "FreeList",
    "HostMemory",
    "HostTier",
    "KVGroup",
    "KVLayout",
    "KVSpec",
    "check_cache",
    "full_attention",
    "make_eviction_order",
    "make_layout",
]
