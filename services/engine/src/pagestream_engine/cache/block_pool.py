"""The pool of KV blocks: how often they are referenced, which are free, and which are known by their content."""

from __future__ import annotations

from collections.abc import Iterable

from pagestream_engine.cache.free_list import FreeList
from pagestream_engine.errors import InvariantViolation


class BlockPool:
    """Blocks `0 .. num_blocks - 1` with reference counts and a map from content hash to block.

    A block is free exactly when its count is 0. A free block keeps its content and its hash until it is allocated
    anew, the least recently freed one first; blocks without a hash go before all others. Everything here is O(1) and
    allocates nothing but the map's entries.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.by_hash: dict[bytes, int] = {}
        self.free_list = FreeList(num_blocks)
        self.num_cached = 0
        """Free blocks whose content can still be found."""
        self._watched: frozenset[bytes] = frozenset()

    @property
    def num_free(self) -> int:
        """Unreferenced blocks, cached ones included."""
        return len(self.free_list)

    def allocate(self) -> int:
        """Take the free block that is cheapest to lose, forget its content, and reference it once.

        Raises:
            IndexError: no block is free.
        """
        block = self.free_list.pop_front()
        known = self.hashes[block]
        if known is not None:
            del self.by_hash[known]
            self.hashes[block] = None
            self.num_cached -= 1
        self.ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """References a block that holds wanted content, free or not."""
        if self.ref_counts[block] == 0:
            self.free_list.remove(block)
            content = self.hashes[block]
            if content is not None:
                self.num_cached -= 1
                self._note_watched(content)
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop one reference; the last one frees the block."""
        count = self.ref_counts[block] - 1
        if count < 0:
            raise InvariantViolation(f"block {block} is released more often than it was referenced")
        self.ref_counts[block] = count
        if count == 0:
            if self.hashes[block] is None:
                self.free_list.push_front(block)
            else:
                self.free_list.push_back(block)
                self.num_cached += 1

    def forget_content(self) -> None:
        """Forget what the blocks hold, where the memory behind them is gone."""
        self.by_hash.clear()
        self.hashes = [None] * self.num_blocks
        self.num_cached = 0

    def lookup(self, content: bytes) -> int | None:
        """The block that holds this content."""
        return self.by_hash.get(content)

    def publish(self, block: int, content: bytes) -> None:
        """Make a referenced full block known by its content, unless another block already is."""
        if content not in self.by_hash:
            self.by_hash[content] = block
            self.hashes[block] = content
            self._note_watched(content)

    # -- the watch --

    @property
    def is_watching(self) -> bool:
        """Whether none of the contents given to `watch` was published, or referenced while it was free, since then."""
        return bool(self._watched)

    def watch(self, contents: Iterable[bytes]) -> None:
        """Watch these contents, instead of those that were watched before, until `is_watching` turns False."""
        self._watched = frozenset(contents)

    def _note_watched(self, content: bytes) -> None:
        if content in self._watched:
            self._watched = frozenset()
