import pytest
from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.cache.invariants import check_cache
from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import Sequence, SequenceState

BLOCK_SIZE = 4


def make_cache(num_blocks: int = 16, *, enable_prefix_caching: bool = True) -> CacheManager:
    return CacheManager(BlockPool(num_blocks), BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching)


def make_seq(token_ids: list[int], name: str = "a", salt: bytes = b"") -> Sequence:
    return Sequence(name, token_ids, SamplingParams(), seed=0, arrival=0, max_total_tokens=999, cache_salt=salt)


def run(cache: CacheManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """Adopts what is cached, and computes up to `num_tokens`."""
    num_tokens = len(seq.token_ids) - 1 if num_tokens is None else num_tokens
    cache.adopt_prefix(seq, cache.find_prefix(seq))
    seq.state = SequenceState.RUNNING
    cache.grow(seq, num_tokens)
    seq.num_computed_tokens = num_tokens
    cache.note_full_block(seq)
    cache.publish_some(num_tokens)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_holds_no_more_than_one_partly_filled_block(num_tokens: int, num_blocks: int) -> None:
    cache, seq = make_cache(), make_seq(list(range(20)))
    cache.grow(seq, num_tokens)
    assert len(seq.block_table) == num_blocks


def test_shares_full_blocks_while_both_run() -> None:
    cache = make_cache()
    first, second = make_seq([1] * 10, "a"), make_seq([1] * 9 + [2], "b")
    run(cache, first)
    run(cache, second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert second.num_published_blocks == 2
    check_cache(cache.pool, BLOCK_SIZE, [first, second])


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    cache = make_cache()
    first, second = make_seq([1, 2, 3, 4, 5, 6, 7, 8], "a"), make_seq([1, 2, 3, 4, 5, 6, 7, 8], "b")
    run(cache, first, 8)
    assert len(cache.find_prefix(second)) == 1
    second.token_ids.append(9)
    assert len(cache.find_prefix(second)) == 2


def test_finds_blocks_after_their_owner_is_gone() -> None:
    cache = make_cache()
    first, second = make_seq(list(range(10)), "a"), make_seq(list(range(10)), "b")
    run(cache, first)
    first.state = SequenceState.FINISHED
    table = list(first.block_table)
    cache.free(first)
    assert cache.find_prefix(second) == table[:2]
    assert cache.num_free_blocks_used_by(cache.find_prefix(second)) == 2
    run(cache, second)
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (20, 8)
    check_cache(cache.pool, BLOCK_SIZE, [first, second])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    cache = make_cache(num_blocks=3)
    seq = make_seq(list(range(13)))
    run(cache, seq)
    table = list(seq.block_table)
    cache.free(seq)
    assert [cache.pool.allocate() for _ in range(3)] == table[::-1]


def test_another_salt_shares_nothing() -> None:
    cache = make_cache()
    run(cache, make_seq([1] * 10, "a", salt=b"tenant-a"))
    assert cache.find_prefix(make_seq([1] * 10, "b", salt=b"tenant-b")) == []
    assert len(cache.find_prefix(make_seq([1] * 10, "c", salt=b"tenant-a"))) == 2


def test_finds_nothing_when_it_is_switched_off() -> None:
    cache = make_cache(enable_prefix_caching=False)
    seq = make_seq([1] * 10)
    run(cache, seq)
    cache.free(seq)
    assert cache.find_prefix(make_seq([1] * 10)) == []
    assert cache.pool.by_hash == {}
    assert cache.num_query_tokens == 0


def test_publishing_is_spread_over_steps() -> None:
    cache = make_cache(num_blocks=400)
    sequences = [make_seq([index, 1, 2, 3, 4], str(index)) for index in range(200)]
    for seq in sequences:
        seq.state = SequenceState.RUNNING
        cache.grow(seq, 4)
        seq.num_computed_tokens = 4
        cache.note_full_block(seq)
    published = []
    while len(cache.pool.by_hash) < 200:
        before = len(cache.pool.by_hash)
        cache.publish_some(num_tokens=len(sequences))
        published.append(len(cache.pool.by_hash) - before)
    assert max(published) == 50, "a step like these fills 200 / 4 blocks on average"
    check_cache(cache.pool, BLOCK_SIZE, sequences)


def test_what_is_not_published_yet_is_when_the_sequence_lets_go() -> None:
    cache = make_cache(num_blocks=64)
    seq = make_seq(list(range(200)))
    seq.state = SequenceState.RUNNING
    cache.grow(seq, 199)
    seq.num_computed_tokens = 199
    cache.note_full_block(seq)
    cache.publish_some(num_tokens=1)
    assert len(cache.pool.by_hash) == 32
    cache.free(seq)
    assert len(cache.pool.by_hash) == 49
    cache.publish_some(num_tokens=1)
    assert len(cache.pool.by_hash) == 49


def test_the_waste_is_the_unused_slots_of_referenced_blocks() -> None:
    cache = make_cache()
    first, second = make_seq([1] * 10, "a"), make_seq([1] * 9 + [2], "b")
    assert cache.fragmentation([]) == 0.0
    run(cache, first)
    assert cache.fragmentation([first]) == 3 / 12, "9 tokens in 3 blocks of 4"
    run(cache, second)
    assert cache.fragmentation([first, second]) == 6 / 16, "two blocks are shared"
    cache.free(first)
    assert cache.fragmentation([second]) == 3 / 12
    cache.free(second)
    assert cache.fragmentation([]) == 0.0
    assert cache.pool.num_cached == 2


def test_a_shared_block_is_counted_by_the_sibling_that_is_past_it() -> None:
    cache = make_cache()
    parent, child = make_seq([1] * 10, "a"), make_seq([1] * 6, "b")
    run(cache, parent)
    child.state = SequenceState.RUNNING
    cache.fork(parent, child, 5)
    assert cache.fragmentation([parent, child]) == 3 / 12, (
        "the second block is full, though the child has one of its tokens"
    )
