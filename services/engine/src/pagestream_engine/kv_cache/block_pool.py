"""The pool of KV blocks: how often they are referenced, which are free, and which are found by their hash."""

from __future__ import annotations

from collections.abc import Iterable

from pagestream_engine.config import CacheConfig
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.kv_cache.eviction import NO_PARENT, EvictionOrder, make_eviction_order


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
