from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_engine.kv_cache import BlockHasher, BlockPool, CacheManager, FreeList, make_eviction_order
from pagestream_engine.plan import NO_BLOCK, full_attention
from pagestream_options import ENGINE_OPTIONS
from support.engines.cached_sequences import make_seq, run

EVICTION_POLICIES = ENGINE_OPTIONS["eviction_policy"].choices or ()
NUM_BLOCKS = 12
LONG = 20_000


def make_cache(policy: str, num_blocks: int = NUM_BLOCKS, block_size: int = 1) -> CacheManager:
    pool = BlockPool(num_blocks, make_eviction_order(policy, num_blocks))
    return CacheManager(pool, full_attention(block_size), enable_prefix_caching=True)


def serve(cache: CacheManager, token_ids: list[int]) -> int:
    """Compute a sequence and end it; return how many of its tokens were cached."""
    seq = make_seq(token_ids)
    run(cache, seq)
    cache.free(seq)
    return cache.num_hit_tokens


def test_each_name_of_the_option_has_its_own_order() -> None:
    names = {name: type(make_eviction_order(name, NUM_BLOCKS)).__name__ for name in EVICTION_POLICIES}
    assert names == {
        "lru": "LeastRecentlyUsed",
        "slru": "Segmented",
        "lfu": "LeastFrequentlyUsed",
        "cost": "LeastCost",
    }


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@settings(max_examples=settings().max_examples // 4)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, 2), min_size=2, max_size=NUM_BLOCKS),
        max_size=40,
    )
)
def test_no_order_evicts_a_block_before_what_continues_it(policy: str, prompts: list[list[int]]) -> None:
    cache = make_cache(policy)
    for prompt in prompts:
        serve(cache, prompt)
        for other in prompts:
            seq, hasher = make_seq(other), BlockHasher(1)
            known = [hasher.block_hash(seq, end) in cache.pool.by_hash for end in range(1, len(other) + 1)]
            assert known == sorted(known, reverse=True), "a block is cached whose beginning is not"


def cached_tokens(cache: CacheManager, token_ids: list[int]) -> int:
    prefix = cache.get_computed_blocks(make_seq(token_ids))
    assert NO_BLOCK not in prefix.tables[0]
    return prefix.num_tokens


@pytest.mark.parametrize(("policy", "keeps"), [("lru", False), ("slru", True), ("lfu", True)])
def test_what_was_found_again_outlives_a_flood_of_new_prompts(policy: str, keeps: bool) -> None:
    cache = make_cache(policy)
    for _ in range(3):
        serve(cache, [1, 1, 1])
    for index in range(3):
        serve(cache, [10 + index] * 5)
    assert (cached_tokens(cache, [1, 1, 1]) == 2) is keeps


def test_protected_blocks_leave_room_for_new_ones() -> None:
    cache = make_cache("slru")
    for _ in range(2):
        serve(cache, [1] * NUM_BLOCKS)
    for _ in range(2):
        serve(cache, [2] * 6)
    assert cached_tokens(cache, [2] * 6) == 5, "a fifth of the pool is protected, not what was found first"


@pytest.mark.parametrize("policy", ["lfu", "cost"])
def test_what_is_no_longer_found_ages(policy: str) -> None:
    cache = make_cache(policy)
    for _ in range(4):
        serve(cache, [1, 1, 1])
    for index in range(40):
        serve(cache, [10 + index] * 6)
    assert cached_tokens(cache, [1, 1, 1]) == 0


def test_cost_keeps_the_longer_prefix_where_recency_keeps_the_later_one() -> None:
    kept = {}
    for policy in ("lru", "cost"):
        cache = make_cache(policy, num_blocks=5, block_size=LONG // 2)
        serve(cache, [1] * (LONG + 1))
        serve(cache, [2] * (LONG // 2 + 1))
        serve(cache, [3] * (3 * LONG // 2 + 1))
        kept[policy] = (cached_tokens(cache, [1] * (LONG + 1)), cached_tokens(cache, [2] * (LONG // 2 + 1)))
    assert kept == {"lru": (LONG // 2, LONG // 2), "cost": (LONG, 0)}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_prefix_that_was_popular_goes_in_the_end(policy: str) -> None:
    """However often it was found: as others come, each of them twice, it is lost before twenty turns of the pool."""
    cache = make_cache(policy)
    popular = [1, 2, 3]
    for _ in range(300):
        serve(cache, popular)
    assert cached_tokens(cache, popular)
    for first in range(10, 10 + 20 * NUM_BLOCKS, 3):
        for _ in range(2):
            serve(cache, [first, first + 1, first + 2])
    assert not cached_tokens(cache, popular)


def test_starts_with_all_blocks_in_order() -> None:
    assert list(FreeList(4)) == [0, 1, 2, 3]


def test_an_empty_list_has_nothing_to_pop() -> None:
    blocks = FreeList(1)
    blocks.pop_front()
    assert len(blocks) == 0
    with pytest.raises(IndexError):
        blocks.pop_front()


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["pop", "remove", "back", "front"]), st.integers(0, 5))))
def test_behaves_like_a_deque(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    blocks, model = FreeList(num_blocks), deque(range(num_blocks))
    for operation, raw in operations:
        block = raw % num_blocks
        if operation == "pop" and model:
            assert blocks.pop_front() == model.popleft()
        elif operation == "remove" and block in model:
            blocks.remove(block)
            model.remove(block)
        elif operation == "back" and block not in model:
            blocks.push_back(block)
            model.append(block)
        elif operation == "front" and block not in model:
            blocks.push_front(block)
            model.appendleft(block)
        assert list(blocks) == list(model)
        assert len(blocks) == len(model)
        assert [block in blocks for block in range(num_blocks)] == [block in model for block in range(num_blocks)]
