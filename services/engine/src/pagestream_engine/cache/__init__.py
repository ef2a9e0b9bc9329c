"""The block pool, its prefix cache, and what holds them together."""

from pagestream_engine.cache.block_hasher import BlockHasher
from pagestream_engine.cache.block_map import CACHED, FREE, HELD, BlockMap
from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.cache.eviction.free_list import FreeList
from pagestream_engine.cache.eviction.select import make_eviction_order
from pagestream_engine.cache.host_tier import HostTier, PageCopy
from pagestream_engine.cache.invariants import check_cache
from pagestream_engine.cache.manager import CachedPrefix, CacheManager
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
    "PageCopy",
    "check_cache",
    "full_attention",
    "make_eviction_order",
    "make_layout",
]
