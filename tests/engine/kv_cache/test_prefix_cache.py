from hashlib import sha256

import pytest
from pagestream_engine import Sequence
from pagestream_engine.kv_cache import BlockHasher, check_cache
from pagestream_engine.plan import NO_BLOCK, KVSpec, make_layout
from pagestream_engine.request import SequenceState
from support.engines.cached_sequences import BLOCK_SIZE, LAYOUT, make_cache, make_seq, run


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_holds_no_more_than_one_partly_filled_block(num_tokens: int, num_blocks: int) -> None:
    cache, seq = make_cache(), make_seq(list(range(20)))
    cache.allocate_slots(seq, num_tokens)
    assert len(seq.block_tables[0]) == num_blocks


def test_shares_full_blocks_while_both_run() -> None:
    cache = make_cache()
    first, second = make_seq([1] * 10, "a"), make_seq([1] * 9 + [2], "b")
    run(cache, first)
    run(cache, second)
    assert second.block_tables[0][:2] == first.block_tables[0][:2]
    assert second.block_tables[0][2] != first.block_tables[0][2]
    assert second.num_published_blocks == 2
    check_cache(cache.pool, LAYOUT, [first, second])


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    cache = make_cache()
    first, second = make_seq([1, 2, 3, 4, 5, 6, 7, 8], "a"), make_seq([1, 2, 3, 4, 5, 6, 7, 8], "b")
    run(cache, first, 8)
    assert cache.get_computed_blocks(second).num_tokens == 4
    second.token_ids.append(9)
    assert cache.get_computed_blocks(second).num_tokens == 8


def test_finds_blocks_after_their_owner_is_gone() -> None:
    cache = make_cache()
    first, second = make_seq(list(range(10)), "a"), make_seq(list(range(10)), "b")
    run(cache, first)
    first.state = SequenceState.FINISHED
    table = list(first.block_tables[0])
    cache.free(first)
    assert cache.get_computed_blocks(second).tables == [table[:2]]
    assert cache.num_free_blocks_used_by(cache.get_computed_blocks(second)) == 2
    run(cache, second)
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (20, 8)
    check_cache(cache.pool, LAYOUT, [first, second])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    cache = make_cache(num_blocks=3)
    seq = make_seq(list(range(13)))
    run(cache, seq)
    table = list(seq.block_tables[0])
    cache.free(seq)
    assert [cache.pool.allocate() for _ in range(3)] == table[::-1]


def test_another_salt_shares_nothing() -> None:
    cache = make_cache()
    run(cache, make_seq([1] * 10, "a", salt=b"tenant-a"))
    assert cache.get_computed_blocks(make_seq([1] * 10, "b", salt=b"tenant-b")).num_tokens == 0
    assert cache.get_computed_blocks(make_seq([1] * 10, "c", salt=b"tenant-a")).num_tokens == 8


def test_finds_nothing_when_it_is_switched_off() -> None:
    cache = make_cache(enable_prefix_caching=False)
    seq = make_seq([1] * 10)
    run(cache, seq)
    cache.free(seq)
    assert cache.get_computed_blocks(make_seq([1] * 10)) == (0, [[]], 0)
    assert cache.pool.by_hash == {}
    assert cache.num_query_tokens == 0


def test_hashing_is_spread_over_steps() -> None:
    cache = make_cache(num_blocks=400)
    sequences = [make_seq([index, 1, 2, 3, 4], str(index)) for index in range(200)]
    for seq in sequences:
        seq.state = SequenceState.RUNNING
        cache.allocate_slots(seq, 4)
        seq.num_computed_tokens = 4
        cache.note_full_block(seq)
    num_cached = []
    while len(cache.pool.by_hash) < 200:
        before = len(cache.pool.by_hash)
        cache.cache_queued_blocks(num_tokens=len(sequences))
        num_cached.append(len(cache.pool.by_hash) - before)
    assert max(num_cached) == 50, "a step like these fills 200 / 4 blocks on average"
    check_cache(cache.pool, LAYOUT, sequences)


def test_what_is_not_cached_yet_is_when_the_sequence_lets_go() -> None:
    cache = make_cache(num_blocks=64)
    seq = make_seq(list(range(200)))
    seq.state = SequenceState.RUNNING
    cache.allocate_slots(seq, 199)
    seq.num_computed_tokens = 199
    cache.note_full_block(seq)
    cache.cache_queued_blocks(num_tokens=1)
    assert len(cache.pool.by_hash) == 32
    cache.free(seq)
    assert len(cache.pool.by_hash) == 49
    cache.cache_queued_blocks(num_tokens=1)
    assert len(cache.pool.by_hash) == 49


MIXED = make_layout([KVSpec(1, 1), KVSpec(1, 1, window=6)], BLOCK_SIZE, 999)
"""Full attention, and a window of one and a half blocks."""


def test_blocks_behind_a_window_are_released_while_the_sequence_runs() -> None:
    cache, seq = make_cache(layout=MIXED), make_seq(list(range(20)), num_kv_groups=2)
    run(cache, seq)
    assert [len(table) for table in seq.block_tables] == [5, 5]
    assert seq.block_tables[1][:3] == [NO_BLOCK] * 3, "token 19 attends to 14 and all after it"
    assert NO_BLOCK not in seq.block_tables[0] + seq.block_tables[1][3:]
    assert cache.pool.num_free == cache.pool.num_blocks - 7
    check_cache(cache.pool, MIXED, [seq])


def test_a_hit_needs_of_a_window_only_what_is_still_read() -> None:
    cache, first = make_cache(layout=MIXED), make_seq(list(range(20)), num_kv_groups=2)
    run(cache, first)
    table = list(first.block_tables[0])
    cache.free(first)
    by_group = [set(table), set(cache.pool.by_hash.values()) - set(table)]
    second = make_seq(list(range(20)), "b", num_kv_groups=2)
    found = cache.get_computed_blocks(second)
    assert found.num_tokens == 16
    assert found.tables[0] == table[:4]
    assert found.tables[1][:2] == [NO_BLOCK] * 2
    assert set(found.tables[1][2:]) <= by_group[1]
    run(cache, second)
    check_cache(cache.pool, MIXED, [first, second])


def test_the_longest_prefix_is_one_that_all_groups_have() -> None:
    cache, first = make_cache(layout=MIXED), make_seq(list(range(20)), num_kv_groups=2)
    run(cache, first)
    last_of_window = first.block_tables[1][3]
    cache.free(first)
    del cache.pool.by_hash[cache.pool.hashes[last_of_window] or b""]
    cache.pool.hashes[last_of_window] = None
    found = cache.get_computed_blocks(make_seq(list(range(20)), "b", num_kv_groups=2))
    assert found.num_tokens == 12, "full attention has 16 tokens, the window what follows its first three blocks"
    assert [len(table) for table in found.tables] == [3, 3]


def numbered_seq(num_tokens: int, salt: bytes = b"", num_outputs: int = 0) -> Sequence:
    tokens = list(range(num_tokens))
    prompt, outputs = tokens[: num_tokens - num_outputs], tokens[num_tokens - num_outputs :]
    return make_seq(prompt, salt=salt, output_token_ids=outputs)


def test_a_hash_covers_the_whole_prefix() -> None:
    hasher = BlockHasher(2)
    first = hasher.hash_block_tokens(hasher.root(), [1, 2])
    assert hasher.hash_block_tokens(first, [3, 4]) != hasher.hash_block_tokens(
        hasher.hash_block_tokens(hasher.root(), [2, 1]), [3, 4]
    )
    assert hasher.hash_block_tokens(first, [3, 4]) != hasher.hash_block_tokens(hasher.root(), [3, 4])


def test_a_hash_is_the_same_on_every_machine() -> None:
    hasher = BlockHasher(2)
    root = sha256(b"pagestream/prefix/1").digest()
    expected = sha256(root + (70000).to_bytes(4, "little") + (1).to_bytes(4, "little")).digest()
    assert hasher.hash_block_tokens(hasher.root(), [70000, 1]) == expected


def test_an_extra_key_shares_nothing() -> None:
    hasher = BlockHasher(1)
    assert len({hasher.root(), hasher.root(b"tenant-a"), hasher.root(b"tenant-b")}) == 3


def test_a_sequences_prefix_has_one_hash_whatever_the_size_of_the_block_that_ends_it() -> None:
    hasher, seq = BlockHasher(2), numbered_seq(9)
    first = hasher.hash_block_tokens(hasher.root(b"tenant"), [0, 1])
    assert hasher.block_hash(numbered_seq(9, b"tenant"), 2) == first
    assert hasher.block_hash(numbered_seq(9, b"tenant"), 4) == hasher.hash_block_tokens(first, [2, 3])
    assert hasher.block_hash(seq, 8) == hasher.block_hash(numbered_seq(8), 8) == seq.block_hashes[3]
    assert hasher.block_hash(seq, 2) == seq.block_hashes[0]


def test_outputs_of_another_kind_of_computation_have_other_hashes() -> None:
    """From the first block with an output on; of a prompt's own blocks they are the same."""

    def hashes(num_outputs: int, *, separates: bool) -> list[bytes]:
        seq = numbered_seq(12, num_outputs=num_outputs)
        BlockHasher(4, separates_outputs=separates).block_hash(seq, 12)
        return seq.block_hashes

    prompt = hashes(0, separates=False)
    for num_outputs, num_equal in ((0, 3), (1, 2), (4, 2), (5, 1), (8, 1), (9, 0)):
        assert hashes(num_outputs, separates=False) == prompt
        own = hashes(num_outputs, separates=True)
        assert own == hashes(num_outputs, separates=True)
        assert [own[index] == prompt[index] for index in range(3)] == [index < num_equal for index in range(3)]
    assert len({hashes(num_outputs, separates=True)[-1] for num_outputs in range(12)}) == 12
