"""Maps of pools; the state machines of the engine compare them with the pool after every step."""

from pagestream_engine.cache.block_map import CACHED, FREE, HELD, MOST_CELLS, MOST_HOLDERS, MOST_SEQUENCES, block_map
from support.engines.cached_sequences import make_cache, make_seq, run


def test_a_shared_prefix_is_held_by_both_and_stays_cached() -> None:
    cache = make_cache(num_blocks=8)
    first, second = make_seq([1] * 9, "a"), make_seq([1] * 8 + [2, 3], "b")
    run(cache, first)
    run(cache, second)
    found = block_map(cache.pool, [first, second], num_running=2, num_waiting=1)
    assert [found.holders[cell - HELD] for cell in found.cells if cell >= HELD] == [((0, 1), 2), ((0, 1), 2), ((1,), 1)]
    assert [(seq.seq_id, seq.num_blocks, seq.is_prefill) for seq in found.sequences] == [
        ("a", 2, False),
        ("b", 3, False),
    ]
    cache.free(first)
    cache.free(second)
    found = block_map(cache.pool, [], num_running=0, num_waiting=0)
    assert sorted(found.cells) == [FREE] * 6 + [CACHED] * 2
    assert (found.num_free, found.num_cached, found.holders) == (8, 2, ())


def test_a_large_pool_is_sampled_and_every_list_has_a_bound() -> None:
    cache = make_cache(num_blocks=3 * MOST_CELLS)
    many = [make_seq([1] * 400 + [number, 0], str(number)) for number in range(MOST_SEQUENCES + 4)]
    for seq in many:
        run(cache, seq)
    found = block_map(cache.pool, many, num_running=len(many), num_waiting=0)
    assert (len(found.cells), len(found.sequences)) == (MOST_CELLS, MOST_SEQUENCES)
    for cell, value in enumerate(found.cells):
        count = cache.pool.ref_counts[3 * cell]
        assert (value >= HELD) == (count > 0)
        if value >= HELD:
            assert found.holders[value - HELD].num_references == count
            assert len(found.holders[value - HELD].sequences) <= MOST_HOLDERS
    assert max(each.num_references for each in found.holders) == len(many)
