"""The pool of KV blocks: how often they are referenced, which are found by their hash, and which free one is used next.

The orders of eviction have names. Least recently used first, plain or in two segments: an intrusive doubly linked list,
all of it O(1) and without allocations. Or least valuable first, where a block's value fades as others are evicted
(GreedyDual: Young, 1994).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from pagestream_engine.config import CacheConfig
from pagestream_engine.errors import InvariantViolation


class BlockPool:
    """Blocks `0 .. num_blocks - 1` with reference counts and a map from block hash to block.

    A block is free exactly when its count is 0. A free block keeps what it holds and its hash until it is allocated
    anew, in the order of `free_blocks`; blocks without a hash go before all others. `allocate`, `touch`, `release` and
    `cache_full_block` are O(1) where the order's operations are, and make no objects but the map's entries.

    A block hash here is `BlockHasher`'s with the KV group that the block belongs to (`GroupCache`).
    """

    def __init__(self, num_blocks: int, order: EvictionOrder | None = None) -> None:
        """Make a pool whose blocks are all free.

        Args:
            order: of all of them, for this pool alone; None: that of the option `eviction_policy` by default.
        """
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.by_hash: dict[bytes, int] = {}
        self.free_blocks = make_eviction_order(CacheConfig().eviction_policy, num_blocks) if order is None else order
        self.num_free = num_blocks
        """Unreferenced blocks, cached ones included: as many as `free_blocks` has."""
        self.num_cached = 0
        """Free blocks that can still be found by their hash."""
        self._watched: frozenset[bytes] = frozenset()

    def allocate(self) -> int:
        """Take the free block that is cheapest to lose, forget its hash, and reference it once.

        Raises:
            IndexError: no block is free.
        """
        block = self.free_blocks.pop_front()
        self.num_free -= 1
        known = self.hashes[block]
        if known is not None:
            del self.by_hash[known]
            self.hashes[block] = None
            self.num_cached -= 1
        self.ref_counts[block] = 1
        return block

    def touch(self, block: int) -> None:
        """Reference a block for what it holds, free or not."""
        if self.ref_counts[block] == 0:
            self.free_blocks.remove(block)
            self.num_free -= 1
            block_hash = self.hashes[block]
            if block_hash is not None:
                self.num_cached -= 1
                self._note_watched(block_hash)
        self.ref_counts[block] += 1

    def reuse(self, block: int) -> None:
        """Reference a block that was found by its hash."""
        self.touch(block)
        self.free_blocks.note_hit(block)

    def release(self, block: int) -> None:
        """Drop one reference; the last one frees the block."""
        count = self.ref_counts[block] - 1
        if count < 0:
            raise InvariantViolation(f"block {block} is released more often than it was referenced")
        self.ref_counts[block] = count
        if count == 0:
            self.num_free += 1
            if self.hashes[block] is None:
                self.free_blocks.add_empty(block)
            else:
                self.free_blocks.add_cached(block)
                self.num_cached += 1

    def reset_prefix_cache(self) -> None:
        """Forget all hashes, where the memory behind the blocks is gone."""
        self.by_hash.clear()
        self.hashes = [None] * self.num_blocks
        self.num_cached = 0

    def cache_full_block(
        self, block: int, block_hash: bytes, num_tokens: int = 0, parent_hash: bytes | None = None
    ) -> None:
        """Let a referenced full block be found by its hash, unless another block already is.

        Args:
            block: not cached yet.
            block_hash: by which it is found.
            num_tokens: of its prefix, its own included.
            parent_hash: of the block before it in its KV group; None: it is the first.
        """
        if block_hash not in self.by_hash:
            self.by_hash[block_hash] = block
            self.hashes[block] = block_hash
            parent = NO_PARENT if parent_hash is None else self.by_hash.get(parent_hash, NO_PARENT)
            self.free_blocks.note_cached(block, num_tokens, parent)
            self._note_watched(block_hash)

    def forget(self, block: int, block_hash: bytes) -> None:
        """Let a block no longer be found by a hash, where what it holds is not what that says. Another hash stays."""
        if self.hashes[block] != block_hash:
            return
        del self.by_hash[block_hash]
        self.hashes[block] = None
        if self.ref_counts[block] == 0:
            self.num_cached -= 1
            self.free_blocks.remove(block)
            self.free_blocks.add_empty(block)

    # -- the watch --

    @property
    def is_watching(self) -> bool:
        """Whether no block with one of the hashes given to `watch` was cached, or touched while free, since then."""
        return bool(self._watched)

    def watch(self, block_hashes: Iterable[bytes]) -> None:
        """Watch these hashes, instead of those that were watched before, until `is_watching` turns False."""
        self._watched = frozenset(block_hashes)

    def watch_also(self, block_hashes: Iterable[bytes]) -> None:
        """Watch these hashes beside those that are watched."""
        self._watched = self._watched.union(block_hashes)

    def _note_watched(self, block_hash: bytes) -> None:
        if block_hash in self._watched:
            self._watched = frozenset()


NO_PARENT = -1
"""In place of the block before it: the block begins a prefix."""


class EvictionOrder(ABC):
    """The free blocks in the order in which they are used anew; at first all blocks of a pool, which hold nothing.

    Empty blocks go before cached ones. No cached block goes before one that continues its prefix, which would be
    worthless without it: a sequence's blocks are added from its end to its beginning.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, block: int) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """The blocks, the one that is used first first."""

    def next_blocks(self) -> Iterator[int]:
        """About the same, at a cost of O(1) for each: which blocks are used anew before long."""
        return iter(self)

    @abstractmethod
    def pop_front(self) -> int:
        """Take the first block.

        Raises:
            IndexError: there is none.
        """

    @abstractmethod
    def remove(self, block: int) -> None:
        """Take a block that is in the order, for what it holds."""

    @abstractmethod
    def add_empty(self, block: int) -> None:
        """Add a block that can't be found by its hash."""

    @abstractmethod
    def add_cached(self, block: int) -> None:
        """Add a block that can be found by its hash: `note_cached` has named it."""

    def note_cached(self, block: int, num_tokens: int, parent: int) -> None:  # noqa: B027 - not every order cares
        """Note that a block can be found from now on. By default nothing.

        Args:
            block: not in the order.
            num_tokens: of its sequence up to the block's end.
            parent: the cached block of the same KV group before it, or NO_PARENT.
        """

    def note_hit(self, block: int) -> None:  # noqa: B027
        """Note that a sequence has found a block. By default nothing.

        Args:
            block: not in the order, or no longer.
        """


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


ATTENTION_TOKENS = 24_576
"""Tokens of context at which attention costs a prompt's token as much as all else: 6 times the hidden size, 4,096 of a
model of 8 billion parameters. Attention takes 4 operations a token of context and unit of hidden size, all else about
24 a unit of hidden size, squared."""

MAX_HITS = 8
"""Hits of a block that count: a prefix that was found thousands of times goes as soon after its last hit as one that
was found so often."""


class _Ageing(HeapOrder):
    """A block's value is its `worth` above the value of the last block that was evicted, and never below that of one
    which continues its prefix and is in the order."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._floor = 0.0
        """Value of the last block that was evicted."""
        self._least = [0.0] * num_blocks
        """Of each block, the highest value of those that continue it."""
        self._parents = [NO_PARENT] * num_blocks
        self._num_tokens = [0] * num_blocks
        self._num_hits = [0] * num_blocks

    @abstractmethod
    def worth(self, num_hits: int, num_tokens: int) -> float:
        """Return what a block is worth by how often it was found, and by the tokens of its prefix."""

    def value(self, block: int) -> float:
        worth = self.worth(self._num_hits[block], self._num_tokens[block])
        value = max(self._floor + worth, self._least[block])
        parent = self._parents[block]
        if parent != NO_PARENT:
            self._least[parent] = max(self._least[parent], value)
        return value

    def note_evicted(self, value: float) -> None:
        self._floor = value

    def note_cached(self, block: int, num_tokens: int, parent: int) -> None:
        self._parents[block] = parent
        self._num_tokens[block] = num_tokens
        self._num_hits[block] = 0
        self._least[block] = 0.0

    def note_hit(self, block: int) -> None:
        self._num_hits[block] = min(self._num_hits[block] + 1, MAX_HITS)


class LeastFrequentlyUsed(_Ageing):
    """By how often a block was found, with ageing (LFU-DA: Arlitt et al., 2000)."""

    def worth(self, num_hits: int, num_tokens: int) -> float:
        return 1.0 + num_hits


class LeastCost(_Ageing):
    """By how often a block was found, times what it costs to compute again (GDSF: Cherkasova, 1998): the later a block
    is in its prefix, the more its tokens attend to."""

    def worth(self, num_hits: int, num_tokens: int) -> float:
        return (1.0 + num_hits) * (1.0 + num_tokens / ATTENTION_TOKENS)


EVICTION_ORDERS: Mapping[str, Callable[[int], EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "slru": Segmented,
    "lfu": LeastFrequentlyUsed,
    "cost": LeastCost,
}
"""By the name of the option `eviction_policy`, whose choices `tools/write_options.py` writes."""


def make_eviction_order(name: str, num_blocks: int) -> EvictionOrder:
    """Make the order of the option `eviction_policy` for a pool of so many blocks, all of which are free."""
    return EVICTION_ORDERS[name](num_blocks)
