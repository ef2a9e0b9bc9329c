"""The checker must notice what it is there for: each test breaks one thing."""

from dataclasses import replace

import pytest
from pagestream_engine import InvariantViolation, SamplingParams, Sequence
from pagestream_engine.kv_cache import BlockPool, CacheManager, check_cache
from pagestream_engine.plan import full_attention
from pagestream_engine.request import SequenceState
from pagestream_engine.scheduler import check_requests

LAYOUT = full_attention(block_size=2)


@pytest.fixture
def cache() -> CacheManager:
    return CacheManager(BlockPool(4), LAYOUT, enable_prefix_caching=True)


@pytest.fixture
def seq(cache: CacheManager) -> Sequence:
    seq = Sequence("a", [1, 2, 3], SamplingParams(), seed=0, arrival=0, max_total_tokens=9)
    seq.state = SequenceState.RUNNING
    cache.allocate_slots(seq, 3)
    seq.num_computed_tokens = 2
    cache.note_full_block(seq)
    cache.cache_queued_blocks(2)
    check_cache(cache.pool, LAYOUT, [seq])
    return seq


def broken(cache: CacheManager, seq: Sequence, match: str) -> None:
    with pytest.raises(InvariantViolation, match=match):
        check_cache(cache.pool, LAYOUT, [seq])


def test_a_leaked_reference(cache: CacheManager, seq: Sequence) -> None:
    cache.pool.allocate()
    broken(cache, seq, "has count 1, tables hold it 0 times")


def test_a_free_block_in_a_table(cache: CacheManager, seq: Sequence) -> None:
    cache.pool.ref_counts[seq.block_tables[0][0]] = 0
    broken(cache, seq, "free and referenced, or neither")


def test_a_map_to_another_block(cache: CacheManager, seq: Sequence) -> None:
    cache.pool.by_hash[b"other"] = seq.block_tables[0][0]
    broken(cache, seq, "does not carry")


def test_a_hash_without_an_entry(cache: CacheManager, seq: Sequence) -> None:
    cache.pool.by_hash.clear()
    broken(cache, seq, "by which it is not found")


def test_other_tokens_under_a_cached_block(cache: CacheManager, seq: Sequence) -> None:
    seq.token_ids[0] = 9
    broken(cache, seq, "other tokens")


def test_a_block_with_outputs_under_the_hash_of_a_prompts() -> None:
    layout = replace(LAYOUT, separates_outputs=True)
    cache = CacheManager(BlockPool(4), layout, enable_prefix_caching=True)
    seq = Sequence("a", [1], SamplingParams(), seed=0, arrival=0, max_total_tokens=9, output_token_ids=[2, 3])
    seq.state = SequenceState.RUNNING
    cache.allocate_slots(seq, 3)
    seq.num_computed_tokens = 2
    cache.note_full_block(seq)
    cache.cache_queued_blocks(2)
    check_cache(cache.pool, layout, [seq])
    seq.num_prompt_tokens = 2
    with pytest.raises(InvariantViolation, match="other tokens"):
        check_cache(cache.pool, layout, [seq])


def test_blocks_ahead_of_the_tokens(cache: CacheManager, seq: Sequence) -> None:
    cache.allocate_slots(seq, 5)
    broken(cache, seq, "more than one partly filled block")


def test_tokens_ahead_of_the_blocks(cache: CacheManager, seq: Sequence) -> None:
    seq.token_ids += [4, 5, 6]
    seq.num_computed_tokens = 5
    broken(cache, seq, "more tokens than its table covers")


def test_blocks_of_a_sequence_that_waits(cache: CacheManager, seq: Sequence) -> None:
    seq.state = SequenceState.WAITING
    broken(cache, seq, "does not run, yet holds blocks")


def fork(cache: CacheManager, seq: Sequence) -> Sequence:
    """A sibling that shares the first three tokens, of which the third is in a block that is not full."""
    seq.token_ids.append(4)
    seq.num_computed_tokens = 3
    other = Sequence("b", [1, 2, 3, 5], SamplingParams(), seed=0, arrival=1, max_total_tokens=9)
    other.state = SequenceState.RUNNING
    cache.fork(seq, other, 3)
    check_cache(cache.pool, LAYOUT, [seq, other], cache.copy_on_write)
    return other


def test_two_that_write_one_block(cache: CacheManager, seq: Sequence) -> None:
    other = fork(cache, seq)
    cache.copy_on_write.forks.clear()
    with pytest.raises(InvariantViolation, match="will write block"):
        check_cache(cache.pool, LAYOUT, [seq, other], cache.copy_on_write)


def test_a_copy_that_does_not_hold_its_source(cache: CacheManager, seq: Sequence) -> None:
    other = fork(cache, seq)
    cache.copy_on_write.assign_own_blocks()
    check_cache(cache.pool, LAYOUT, [seq, other], cache.copy_on_write)
    cache.pool.release(cache.copy_on_write.copies[0].source)
    with pytest.raises(InvariantViolation, match="tables hold it"):
        check_cache(cache.pool, LAYOUT, [seq, other], cache.copy_on_write)


def test_a_copy_to_a_block_that_no_sequence_holds(cache: CacheManager, seq: Sequence) -> None:
    other = fork(cache, seq)
    cache.copy_on_write.assign_own_blocks()
    cache.pool.release(other.block_tables[0].pop())
    other.num_computed_tokens = 2
    with pytest.raises(InvariantViolation, match="target of a copy, and no sequence holds it"):
        check_cache(cache.pool, LAYOUT, [seq, other], cache.copy_on_write)


def test_siblings_that_stand_apart(cache: CacheManager, seq: Sequence) -> None:
    other = fork(cache, seq)
    other.request, seq.request.sequences = seq.request, [seq, other]
    check_requests([seq, other])
    with pytest.raises(InvariantViolation, match="the requests' choices are not the sequences"):
        check_requests([seq])
    other.leader = seq
    with pytest.raises(InvariantViolation, match="which does not lead it"):
        check_requests([seq, other])
    seq.followers = [other]
    with pytest.raises(InvariantViolation, match="follows, and waits or holds blocks"):
        check_requests([seq, other])
    other.leader = None
    with pytest.raises(InvariantViolation, match="which is another's"):
        check_requests([seq, other])
    seq.followers = []
    other.state = SequenceState.WAITING
    with pytest.raises(InvariantViolation, match="wait that should"):
        check_requests([seq, other])
