"""The waste of KV blocks, counted slot by slot."""

from pagestream_engine import Engine


def check_waste(engine: Engine) -> None:
    """Assert that the engine's statistics of blocks equal a walk over all tables, between two steps."""
    size = engine.block_size
    filled: dict[int, int] = {}
    for seq in engine._scheduler.running():
        for index, block in enumerate(seq.block_table):
            here = min(size, max(0, seq.num_computed_tokens - index * size))
            filled[block] = max(here, filled.get(block, 0))
    for copy in engine._cache.copy_on_write.copies:  # due since a step that failed; held until it is made
        filled.setdefault(copy.source, size)
    slots = len(filled) * size
    assert engine.fragmentation() == ((slots - sum(filled.values())) / slots if slots else 0.0)
    stats = engine.stats()
    assert 0 <= stats.num_cached_blocks <= stats.num_free_blocks == stats.num_blocks - len(filled)
