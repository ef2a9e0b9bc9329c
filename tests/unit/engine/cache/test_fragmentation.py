from pagestream_engine.cache.fragmentation import fragmentation
from pagestream_engine.request.sequence import SequenceState
from support.engines.cached_sequences import make_cache, make_seq, run


def test_the_waste_is_the_unused_slots_of_referenced_blocks() -> None:
    cache = make_cache()
    first, second = make_seq([1] * 10, "a"), make_seq([1] * 9 + [2], "b")
    assert fragmentation(cache, []) == 0.0
    run(cache, first)
    assert fragmentation(cache, [first]) == 3 / 12, "9 tokens in 3 blocks of 4"
    run(cache, second)
    assert fragmentation(cache, [first, second]) == 6 / 16, "two blocks are shared"
    cache.free(first)
    assert fragmentation(cache, [second]) == 3 / 12
    cache.free(second)
    assert fragmentation(cache, []) == 0.0
    assert cache.pool.num_cached == 2


def test_a_shared_block_is_counted_by_the_sibling_that_is_past_it() -> None:
    cache = make_cache()
    parent, child = make_seq([1] * 10, "a"), make_seq([1] * 6, "b")
    run(cache, parent)
    child.state = SequenceState.RUNNING
    cache.fork(parent, child, 5)
    assert fragmentation(cache, [parent, child]) == 3 / 12, (
        "the second block is full, though the child has one of its tokens"
    )


def test_blocks_that_are_held_for_a_chunk_that_became_smaller_are_counted_each() -> None:
    cache = make_cache()
    parent, child = make_seq([1] * 16, "a"), make_seq([1] * 8, "b")
    child.state = SequenceState.RUNNING
    cache.allocate_slots(parent, 16)
    parent.num_computed_tokens = 5
    cache.fork(parent, child, 5)
    assert fragmentation(cache, [parent, child]) == 11 / 16, "the child's second block is the parent's"
