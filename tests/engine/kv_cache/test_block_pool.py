from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pagestream_engine import InvariantViolation
from pagestream_engine.kv_cache import BlockPool, check_cache, make_eviction_order
from pagestream_engine.plan import full_attention


def test_a_freed_block_keeps_its_hash_until_it_is_used_anew() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.cache_full_block(block, b"hash")
    pool.release(block)
    assert pool.by_hash.get(b"hash") == block
    assert pool.num_free == 2
    assert pool.allocate() != block, "the block without a hash goes first"
    assert pool.allocate() == block
    assert pool.by_hash.get(b"hash") is None


def test_evicts_the_least_recently_freed_block_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.cache_full_block(block, bytes([block]))
    for block in (blocks[1], blocks[2], blocks[0]):
        pool.release(block)
    pool.touch(blocks[1])
    pool.release(blocks[1])
    assert [pool.allocate() for _ in range(3)] == [blocks[2], blocks[0], blocks[1]]


def test_a_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.touch(block)
    pool.release(block)
    assert pool.num_free == 0
    pool.release(block)
    assert pool.num_free == 1


def test_the_second_block_of_the_same_hash_is_not_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.cache_full_block(first, b"same")
    pool.cache_full_block(second, b"same")
    assert pool.by_hash.get(b"same") == first
    assert pool.hashes[second] is None


def test_a_release_too_many_is_noticed() -> None:
    pool = BlockPool(1)
    with pytest.raises(InvariantViolation, match="more often"):
        pool.release(0)


def test_an_exhausted_pool_says_so() -> None:
    with pytest.raises(IndexError):
        BlockPool(0).allocate()


EVICTION_POLICIES = ("lru", "slru", "lfu", "cost")


class PoolMachine(RuleBasedStateMachine):
    """Random use against a model: a bag of references, and a map from block hash to block."""

    pool: BlockPool

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        self.known: dict[bytes, int] = {}

    @initialize(policy=st.sampled_from(EVICTION_POLICIES))
    def start(self, policy: str) -> None:
        self.pool = BlockPool(5, make_eviction_order(policy, 5))

    @precondition(lambda self: self.pool.num_free > 0)
    @rule()
    def allocate(self) -> None:
        is_empty_free = any(block not in self.known.values() for block in self.pool.free_blocks)
        first = next(iter(self.pool.free_blocks))
        block = self.pool.allocate()
        assert block == first
        assert block not in self.held
        assert not (is_empty_free and block in self.known.values()), "an empty block goes before a cached one"
        self.held.append(block)
        self.known = {known: other for known, other in self.known.items() if other != block}

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def acquire_known(self, data: st.DataObject) -> None:
        block_hash = data.draw(st.sampled_from(sorted(self.known)))
        block = self.pool.by_hash.get(block_hash)
        assert block == self.known[block_hash]
        self.pool.reuse(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.release(block)
        self.held.remove(block)

    @precondition(lambda self: set(self.held) - set(self.known.values()))
    @rule(data=st.data(), block_hash=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def cache(self, data: st.DataObject, block_hash: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.held) - set(self.known.values()))))
        parent_hash = data.draw(st.sampled_from([None, *sorted(self.known)]))
        self.pool.cache_full_block(block, block_hash, data.draw(st.integers(1, 99_999)), parent_hash)
        self.known.setdefault(block_hash, block)

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        check_counts = Counter(self.held)
        assert [check_counts[block] for block in range(5)] == self.pool.ref_counts
        assert self.pool.by_hash == self.known
        assert set(self.pool.free_blocks) == set(range(5)) - set(self.held)
        assert self.pool.num_free == 5 - len(set(self.held))
        if not self.held:
            check_cache(self.pool, full_attention(4), [])


PoolMachine.TestCase.settings = settings(max_examples=settings().max_examples // 3, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase


def test_a_watch_ends_when_a_watched_block_is_cached_or_touched_again() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.cache_full_block(first, b"first")
    pool.watch([b"first", b"third"])
    pool.cache_full_block(second, b"second")
    pool.touch(first)
    pool.release(second)
    pool.touch(second)
    assert pool.is_watching
    pool.cache_full_block(pool.allocate(), b"third")
    assert not pool.is_watching
    pool.release(second)
    pool.watch([b"second"])
    pool.touch(second)
    assert not pool.is_watching
