"""Least recently used first: plain, or in two segments. All is O(1) and allocates nothing."""

from __future__ import annotations

from collections.abc import Iterator

from pagestream_engine.cache.eviction.base import EvictionOrder
from pagestream_engine.cache.eviction.free_list import FreeList

PROTECTED_SHARE = 0.2
"""Of the pool; the best of 0.05 to 0.8 on the first half of the trace of `tests/benchmarks/prefix_cache.py`."""


class LeastRecentlyUsed(FreeList, EvictionOrder):
    """One list, which vLLM's cache has too: what was freed longest ago goes first."""

    def add_empty(self, block: int) -> None:
        self.push_front(block)

    def add_cached(self, block: int) -> None:
        self.push_back(block)


class Segmented(EvictionOrder):
    """Two lists (SLRU: Karedla, Love, Wherry, 1994): blocks that were found again are kept longer than those that were
    not yet, so that a flood of prompts that never come again does not wash them out.

    The protected ones take at most PROTECTED_SHARE of the pool; the one that is freed longest goes over to the others
    then, as the most recent of them.
    """

    def __init__(self, num_blocks: int) -> None:
        self._unproven = FreeList(num_blocks)
        self._protected = FreeList(num_blocks, is_full=False)
        self._most_protected = int(num_blocks * PROTECTED_SHARE)
        self._was_hit = bytearray(num_blocks)

    def __len__(self) -> int:
        return len(self._unproven) + len(self._protected)

    def __contains__(self, block: int) -> bool:
        return block in self._unproven or block in self._protected

    def __iter__(self) -> Iterator[int]:
        yield from self._unproven
        yield from self._protected

    def pop_front(self) -> int:
        return (self._unproven if len(self._unproven) else self._protected).pop_front()

    def remove(self, block: int) -> None:
        (self._unproven if block in self._unproven else self._protected).remove(block)

    def add_empty(self, block: int) -> None:
        self._unproven.push_front(block)

    def add_cached(self, block: int) -> None:
        if not self._was_hit[block]:
            self._unproven.push_back(block)
            return
        self._protected.push_back(block)
        if len(self._protected) > self._most_protected:
            self._unproven.push_back(self._protected.pop_front())

    def note_cached(self, block: int, num_tokens: int, parent: int) -> None:
        self._was_hit[block] = False

    def note_hit(self, block: int) -> None:
        self._was_hit[block] = True
