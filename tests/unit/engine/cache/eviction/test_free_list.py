from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine.cache.eviction.free_list import FreeList


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
