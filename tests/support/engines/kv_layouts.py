"""Layers of small models whose KV groups differ."""

from pagestream_engine.cache import KVSpec

LAYERS: dict[str, tuple[KVSpec, ...]] = {
    "full": (KVSpec(1, 1),),
    "full and full with larger blocks": (KVSpec(2, 1), KVSpec(1, 1)),
    "window": (KVSpec(1, 1, window=5),),
    "full and window": (KVSpec(1, 1), KVSpec(1, 1, window=6)),
    "window of one token": (KVSpec(1, 1), KVSpec(1, 1, window=1)),
    "two windows": (KVSpec(1, 1, window=3), KVSpec(1, 1, window=11)),
    "full with larger blocks": (KVSpec(1, 1), KVSpec(2, 1, window=7)),
    "window with larger blocks": (KVSpec(2, 2), KVSpec(1, 2, window=4), KVSpec(1, 1, window=9)),
}
"""By what is particular about them. Windows are as short as the prompts of the tests."""
