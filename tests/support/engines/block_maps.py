"""What must be true of a map of blocks at any time: it says what the pool and the tables say."""

from collections import Counter

from pagestream_engine.cache.block_map import CACHED, FREE, HELD
from pagestream_engine.engine import Engine


def check_block_map(engine: Engine) -> None:
    """Compare the map of a small pool, which has a cell for each block, with the pool and with the tables."""
    found, pool, stats = engine.block_map(), engine._pool, engine.stats()
    running = list(engine._scheduler.running())
    tables = [Counter(block for table in seq.block_tables for block in table) for seq in running]
    assert (found.num_running, found.num_waiting) == (stats.num_running, stats.num_waiting)
    assert len(found.cells) == found.num_blocks == pool.num_blocks
    assert [seq.seq_id for seq in found.sequences] == [seq.seq_id for seq in running]
    counts = Counter(min(cell, HELD) for cell in found.cells)
    assert counts[FREE] + counts[CACHED] == found.num_free == pool.num_free
    assert counts[CACHED] == found.num_cached == pool.num_cached
    shown: Counter[int] = Counter()
    for block, cell in enumerate(found.cells):
        if cell >= HELD:
            holders = found.holders[cell - HELD]
            owners = [place for place, table in enumerate(tables) if table[block]]
            assert list(holders.sequences) == owners[: len(holders.sequences)]
            assert holders.num_references == pool.ref_counts[block] >= len(owners)
            assert holders.num_references > 1 or len(holders.sequences) <= 1, "a block with two owners is shared"
            shown.update(owners)
        else:
            assert not pool.ref_counts[block]
    assert [seq.num_blocks for seq in found.sequences] == [shown[place] for place in range(len(running))]
