"""The orders of eviction by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagestream_engine.cache.eviction.base import EvictionOrder
from pagestream_engine.cache.eviction.recency import LeastRecentlyUsed, Segmented
from pagestream_engine.cache.eviction.value import LeastCost, LeastFrequentlyUsed
from pagestream_engine.config import ENGINE_OPTIONS

_MAKERS: Mapping[str, Callable[[int], EvictionOrder]] = dict(
    zip(
        ENGINE_OPTIONS["eviction_policy"].choices or (),
        (LeastRecentlyUsed, Segmented, LeastFrequentlyUsed, LeastCost),
        strict=True,
    )
)


def make_eviction_order(name: str, num_blocks: int) -> EvictionOrder:
    """Make the order of the option `eviction_policy` for a pool of so many blocks, all of which are free."""
    return _MAKERS[name](num_blocks)
