"""Free blocks by a value that each has when it is freed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from pagestream_engine.cache.eviction.base import EvictionOrder


class HeapOrder(EvictionOrder):
    """The lowest value first; of equal ones the block that was freed first. O(log n).

    A removed block's entry stays in the heap, and is skipped by its number.
    """

    def __init__(self, num_blocks: int) -> None:
        self._empty: dict[int, None] = dict.fromkeys(range(num_blocks))
        self._heap: list[tuple[float, int, int]] = []
        self._numbers: dict[int, int] = {}
        """Of each cached block that of its entry."""
        self._num_entries = 0

    @abstractmethod
    def value(self, block: int) -> float:
        """Return the value of a cached block that is freed now."""

    def note_evicted(self, value: float) -> None:
        """Note that a cached block of this value was taken. By default nothing."""

    def __len__(self) -> int:
        return len(self._empty) + len(self._numbers)

    def __contains__(self, block: int) -> bool:
        return block in self._empty or block in self._numbers

    def __iter__(self) -> Iterator[int]:
        yield from self._empty
        yield from (block for _, number, block in sorted(self._heap) if self._numbers.get(block) == number)

    def next_blocks(self) -> Iterator[int]:
        """The heap level by level."""
        yield from self._empty
        yield from (block for _, number, block in self._heap if self._numbers.get(block) == number)

    def pop_front(self) -> int:
        if self._empty:
            block = next(iter(self._empty))
            del self._empty[block]
            return block
        while self._heap:
            value, number, block = heappop(self._heap)
            if self._numbers.get(block) == number:
                del self._numbers[block]
                self.note_evicted(value)
                return block
        raise IndexError("no free block")

    def remove(self, block: int) -> None:
        if block in self._empty:
            del self._empty[block]
            return
        del self._numbers[block]
        if len(self._heap) > 2 * len(self._numbers) + 64:
            self._heap = [entry for entry in self._heap if self._numbers.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def add_empty(self, block: int) -> None:
        self._empty[block] = None

    def add_cached(self, block: int) -> None:
        self._num_entries += 1
        self._numbers[block] = self._num_entries
        heappush(self._heap, (self.value(block), self._num_entries, block))
