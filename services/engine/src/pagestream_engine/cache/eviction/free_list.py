"""The free blocks in the order in which they are to be used: an intrusive doubly linked list."""

from __future__ import annotations

from collections.abc import Iterator

_NOT_IN_LIST = -1


class FreeList:
    """Links live in two arrays indexed by block, so that every operation is O(1) and allocates nothing.

    The front is used first: what was pushed back longest ago (least recently used), or pushed to the front.
    """

    def __init__(self, num_blocks: int, *, is_full: bool = True) -> None:
        """Make a list for blocks below `num_blocks`, of all of them or of none."""
        self._end = end = num_blocks  # a sentinel: before the first, after the last
        self._next: list[int] = [*range(1, num_blocks + 1), 0] if is_full else [*[_NOT_IN_LIST] * num_blocks, end]
        self._prev: list[int] = [num_blocks, *range(num_blocks)] if is_full else [*[_NOT_IN_LIST] * num_blocks, end]
        self._len = num_blocks if is_full else 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _NOT_IN_LIST

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def pop_front(self) -> int:
        """Take the first block.

        Raises:
            IndexError: the list is empty.
        """
        block = self._next[self._end]
        if block == self._end:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Take a block that is in the list."""
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = _NOT_IN_LIST
        self._len -= 1

    def push_back(self, block: int) -> None:
        """Add a block to be used last."""
        self._insert(self._prev[self._end], block, self._end)

    def push_front(self, block: int) -> None:
        """Add a block to be used first."""
        self._insert(self._end, block, self._next[self._end])

    def _insert(self, before: int, block: int, after: int) -> None:
        self._next[before] = block
        self._prev[block] = before
        self._next[block] = after
        self._prev[after] = block
        self._len += 1
