"""The waste of KV blocks, counted slot by slot."""

from pagestream_engine import Engine
from pagestream_engine.cache.kv_groups import NO_BLOCK


def check_waste(engine: Engine) -> None:
    """Assert that the engine's statistics of blocks equal a walk over all tables, between two steps."""
    filled: dict[int, float] = {}
    for index, group in enumerate(engine._cache.layout.groups):
        size = group.block_size
        for seq in engine._scheduler.running():
            for place, block in enumerate(seq.block_tables[index]):
                if block != NO_BLOCK:
                    here = min(size, max(0, seq.num_sent_tokens - place * size)) / size
                    filled[block] = max(here, filled.get(block, 0))
    for copy in engine._cache.copy_on_write.copies:  # due since a step that failed; held until it is made
        filled.setdefault(copy.source, 1)
    assert engine.fragmentation() == ((len(filled) - sum(filled.values())) / len(filled) if filled else 0.0)
    stats = engine.stats()
    assert 0 <= stats.num_cached_blocks <= stats.num_free_blocks == stats.num_blocks - len(filled)
