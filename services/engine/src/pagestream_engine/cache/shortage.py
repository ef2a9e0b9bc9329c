"""How many blocks a sequence that found no room takes at least: an answer that holds without another lookup."""

from __future__ import annotations

from pagestream_engine.cache.manager import CachedPrefix, CacheManager
from pagestream_engine.request import TokenSequence


def least_wanted_blocks(cache: CacheManager, seq: TokenSequence, prefix: CachedPrefix, chunk: int) -> int:
    """Free blocks that a waiting sequence takes at least, whatever prefix a lookup finds while the pool's watch lasts.

    What it takes is `num_promised_blocks` and `num_free_blocks_used_by`. A cached block that is free counts in one
    where it does not in the other: only those that running sequences hold save anything. There can be more of them
    when a block of the cached prefix, or the one after it, is cached or touched anew; the pool watches for that.

    Args:
        cache: its pool watches from now on for this sequence, beside those that it watches for.
        prefix: what `get_computed_blocks` has found for it.
        chunk: most tokens of a step.
    """
    num_blocks, watched = 0, list[bytes]()
    for group_cache, table in zip(cache.groups, prefix.tables, strict=True):
        num_held, block_hashes = group_cache.most_held(seq, table, prefix.most_tokens)
        num_blocks += max(0, group_cache.group.max_blocks_held(len(seq), chunk) - num_held)
        watched += block_hashes
    cache.pool.watch_also(watched)
    return num_blocks
