"""Host memory for evicted blocks: what it takes, and which page a copy goes to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pagestream_engine.attention.kv_store import CacheShape, KVStore
from pagestream_engine.runner.host_pages import HostPages
from pagestream_engine.transfers import MAX_SLAB_BYTES, slab_pages

GIB = 1 << 30


def rounded(num_bytes: int) -> int:
    """What torch takes for pinned memory of this size."""
    return 1 << (num_bytes - 1).bit_length()


@given(num_bytes=st.integers(0, 1 << 38), page_bytes=st.integers(1, 1 << 32))
@example(num_bytes=33 * GIB, page_bytes=131_072)
@example(num_bytes=64 * GIB, page_bytes=80 * 2 * 8 * 64 * 128 * 2)
def test_pinned_pages_take_no_more_than_was_asked_for(num_bytes: int, page_bytes: int) -> None:
    slabs = slab_pages(num_bytes, page_bytes, pinned=True)
    taken = [rounded(count * page_bytes) for count in slabs]
    assert sum(taken) <= num_bytes
    assert all(size <= max(MAX_SLAB_BYTES, rounded(page_bytes)) for size in taken)
    assert num_bytes - sum(slabs) * page_bytes < (len(slabs) + 2) * page_bytes


def test_pages_that_are_not_pinned_are_one_allocation() -> None:
    assert slab_pages(1000, 300, pinned=False) == [3]
    assert slab_pages(299, 300, pinned=False) == []


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_pages_of_all_allocations_keep_what_is_saved(cache_dtype: torch.dtype | None) -> None:
    store = KVStore([CacheShape((0, 1), 3, 8, 1, torch.float32, cache_dtype)], torch.device("cpu"))
    store.allocate(7)
    for part in store.parts:
        part.view(torch.uint8).random_(0, 100)
    expected = [part.clone() for part in store.parts]
    pages = HostPages(store, [4, 2, 1])
    assert len(pages) == 7
    order = [3, 6, 0, 5, 2, 4, 1]
    pages.launch([(block, page) for block, page in enumerate(order)], [])
    for part in store.parts:
        part.zero_()
    pages.launch([], [(block, page) for block, page in enumerate(order)])
    assert all(map(torch.equal, store.parts, expected))
