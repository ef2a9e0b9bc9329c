"""What sequences ask of the pool, over all KV groups: find a prefix, take blocks, release them, cache full ones."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from pagestream_engine.cache.block_hasher import BlockHasher
from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.cache.copies import CopyOnWrite
from pagestream_engine.cache.group_cache import GroupCache
from pagestream_engine.cache.host_tier import HostTier
from pagestream_engine.plan import NO_BLOCK, TO_LOAD, KVLayout
from pagestream_engine.request import TokenSequence

_HASH_AT_LEAST = 32
"""Blocks that are hashed in a step however few wait: about 50 microseconds."""


class CachedPrefix(NamedTuple):
    """Leading tokens of a sequence whose keys and values the pool has."""

    num_tokens: int
    tables: list[list[int]]
    """For each KV group the block table that covers them; NO_BLOCK where no later token reads a block, TO_LOAD where it
    is in host memory."""
    most_tokens: int
    """Tokens of the longest prefix that was looked for."""

    @property
    def num_to_load(self) -> int:
        """Blocks that are in host memory."""
        return sum(table.count(TO_LOAD) for table in self.tables)


class CacheManager:
    """Block tables of all KV groups over one pool, and the prefix cache.

    Only full blocks are cached (found by others from then on), after their keys and values are computed.
    A cached prefix never has a sequence's last token, whose logits are needed.
    A block's hash is chained: it stands for all tokens up to the block's end, and the salt (`BlockHasher`).
    All KV groups have the prefix: it ends where the last of them agrees.

    Full blocks wait to be hashed in a queue of which each step takes a share, so that many sequences that fill a block
    in the same step make no spike; what a sequence still has in the queue is cached when it releases its blocks.
    """

    def __init__(
        self, pool: BlockPool, layout: KVLayout, *, enable_prefix_caching: bool, tier: HostTier | None = None
    ) -> None:
        """Manage an unused pool.

        Args:
            enable_prefix_caching: whether full blocks are found again.
            tier: below the pool; only with prefix caching.
        """
        self.tier = tier
        self.num_host_hit_tokens = 0
        """Tokens whose block was loaded from host memory, in the KV group that loaded most, those of preempted
        sequences included."""
        self.pool = pool
        self.layout = layout
        self.block_size = layout.block_size
        self.finest_group = layout.finest_group
        self.enable_prefix_caching = enable_prefix_caching
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        """Of them those that were cached; see `_counts_hits_of`."""
        self.copy_on_write = CopyOnWrite(pool)
        self._hasher = BlockHasher(layout.block_size, separates_outputs=layout.separates_outputs)
        self.groups = [GroupCache(pool, index, group, self._hasher, tier) for index, group in enumerate(layout.groups)]
        """In the order of the layout."""
        self._with_window = [cache for cache in self.groups if cache.group.spec.window is not None]
        self._lookup_order = sorted(self.groups, key=lambda cache: cache.group.spec.window is not None)
        self._alignment = max(group.block_size for group in layout.groups)
        self._uncached: deque[TokenSequence] = deque()

    # -- how much it takes --

    def num_missing_blocks(self, seq: TokenSequence, num_tokens: int) -> int:
        """Blocks that the tables lack to cover the first `num_tokens`."""
        return sum([cache.num_missing_blocks(seq, num_tokens) for cache in self.groups])

    def num_next_blocks(self, sequences: list[TokenSequence]) -> int:
        """Blocks that `allocate_next_slots` takes for sequences that need a block (see `DecodeSet.needing_block`)."""
        if len(self.groups) == 1:
            return len(sequences)
        return sum([self.num_missing_blocks(seq, seq.num_sent_tokens + 1) for seq in sequences])

    def num_fitting_tokens(self, seq: TokenSequence, most: int) -> int:
        """How many of a sequence's next tokens the free blocks can cover, up to `most`."""
        sent, free = seq.num_sent_tokens, self.pool.num_free
        if self.num_missing_blocks(seq, sent + most) <= free:
            return most
        return bisect_right(range(1, most), free, key=lambda count: self.num_missing_blocks(seq, sent + count))

    def num_promised_blocks(self, seq: TokenSequence, chunk: int, prefix: CachedPrefix | None = None) -> int:
        """Blocks that a sequence has yet to take until its present tokens are computed, in chunks of at most `chunk`.

        Args:
            prefix: what it has instead of its tables.
        """
        tables = seq.block_tables if prefix is None else prefix.tables
        return sum(
            cache.num_promised_blocks(seq, table, chunk) for cache, table in zip(self.groups, tables, strict=True)
        )

    def num_own_blocks(self, num_shared_tokens: int, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence of `num_tokens` takes beside those that it shares with the leader of its group."""
        return sum(cache.num_own_blocks(num_shared_tokens, num_tokens, chunk) for cache in self.groups)

    def num_free_blocks_used_by(self, prefix: CachedPrefix) -> int:
        """How many free blocks a prefix takes: those of its own that are free now, and those that are to be loaded."""
        ref_counts = self.pool.ref_counts
        return sum(
            1
            for table in prefix.tables
            for block in table
            if block == TO_LOAD or (block != NO_BLOCK and ref_counts[block] == 0)
        )

    # -- prefix --

    def get_computed_blocks(
        self, seq: TokenSequence, most: int | None = None, *, may_load: bool = False
    ) -> CachedPrefix:
        """Return the longest cached prefix of a sequence.

        Args:
            seq: without blocks.
            most: tokens of the longest prefix that is wanted.
            may_load: whether blocks in host memory count.
        """
        most_tokens = 0
        if self.enable_prefix_caching and not seq.needs_whole_prompt:
            most_tokens = len(seq.token_ids) - 1 if most is None else min(len(seq.token_ids) - 1, most)
        num_tokens = self._common_hit(seq, most_tokens, may_load=may_load)
        return CachedPrefix(num_tokens, [cache.cached_table(seq, num_tokens) for cache in self.groups], most_tokens)

    def next_block_hash(self, seq: TokenSequence, num_tokens: int) -> bytes | None:
        """Return the hash of the block that would continue a cached prefix of so many tokens; None where none can."""
        end = (num_tokens // self._alignment + 1) * self._alignment
        if not self.enable_prefix_caching or end > len(seq.token_ids) - 1:
            return None
        return self._hasher.block_hash(seq, end)

    def touch_prefix(self, seq: TokenSequence, prefix: CachedPrefix) -> None:
        """Reference what `get_computed_blocks` found as the beginning of empty tables, and take blocks for what
        the next step loads: see `HostTier`."""
        for cache, table in zip(self.groups, prefix.tables, strict=True):
            cache.reuse(seq, table)
        if self.tier is not None:
            num_loaded = 0
            for cache, table in zip(self.groups, prefix.tables, strict=True):
                cache.load(seq)  # After all that was found is referenced, so that none of it is evicted.
                # Of the group that loads most: a window has only the end of a prefix.
                num_loaded = max(num_loaded, table.count(TO_LOAD) * cache.group.block_size)
            self.num_host_hit_tokens += num_loaded
        seq.num_cached_blocks = prefix.num_tokens // self.block_size
        seq.num_computed_tokens = prefix.num_tokens
        if self.enable_prefix_caching and self._counts_hits_of(seq):
            self.num_query_tokens += len(seq.token_ids)
            self.num_hit_tokens += prefix.num_tokens

    @staticmethod
    def _counts_hits_of(seq: TokenSequence) -> bool:
        """Whether what the cache has of a sequence is a hit. What it, or a choice of the same prompt, has computed
        before it lost its blocks, or what another engine has generated of it, is found again, and saves nobody's work.
        """
        return not seq.choices.was_admitted and not seq.num_output_tokens

    def _common_hit(self, seq: TokenSequence, num_tokens: int, *, may_load: bool) -> int:
        """Lower the number of tokens until all groups agree to it: a window may have kept less than full attention, or
        what it kept may end elsewhere."""
        agreed = 0
        while agreed < len(self.groups):
            for cache in self._lookup_order:
                hit = cache.longest_hit(seq, num_tokens, self._alignment, may_load=may_load)
                agreed = agreed + 1 if hit == num_tokens else 1
                num_tokens = hit
                if agreed == len(self.groups):
                    break
        return num_tokens

    # -- tables --

    def allocate_slots(self, seq: TokenSequence, num_tokens: int) -> None:
        """Extend the tables to cover the first `num_tokens`; the caller has seen to it that blocks are free."""
        for cache in self.groups:
            cache.allocate_slots(seq, num_tokens)

    def allocate_next_slots(self, sequences: list[TokenSequence]) -> None:
        """Extend the tables to cover one more token of each; the caller has seen to it that blocks are free."""
        for cache in self.groups:
            cache.allocate_next_slots(sequences)

    def fork(self, parent: TokenSequence, child: TokenSequence, num_tokens: int) -> None:
        """Let a sequence without blocks share those of its first tokens, which `parent` has too, and has computed.

        Where the last block is not full, it is shared only until `copy_on_write.assign_own_blocks`.
        """
        for cache in self.groups:
            if cache.share(parent, child, num_tokens):
                self.copy_on_write.add(child, cache.index)
        num_full = num_tokens // self.block_size
        child.block_hashes.extend(parent.block_hashes[len(child.block_hashes) : num_full])
        child.num_cached_blocks = min(parent.num_cached_blocks, num_full)
        child.num_computed_tokens = num_tokens

    def free(self, seq: TokenSequence) -> None:
        """Cache what is full, and release all blocks: the end of the prefix is evicted before its beginning."""
        if self.copy_on_write:
            self.copy_on_write.forget(seq)
        if self.tier is not None:
            self.tier.forget(seq)
        if seq.num_computed_tokens:
            self._cache_full_blocks(seq, self._num_full_blocks(seq))
        for block in self._from_end_to_beginning(seq):
            self.pool.release(block)
        for table in seq.block_tables:
            table.clear()
        seq.num_cached_blocks = 0
        seq.num_computed_tokens = 0
        seq.num_in_flight_tokens = 0

    def _from_end_to_beginning(self, seq: TokenSequence) -> Iterable[int]:
        """The blocks of all groups, in the order in which they are to be evicted."""
        if len(self.groups) == 1:
            return [block for block in reversed(seq.block_tables[0]) if block != NO_BLOCK]
        ends = [
            ((place + 1) * cache.group.block_size, block)
            for cache in self.groups
            for place, block in enumerate(cache.table(seq))
            if block != NO_BLOCK
        ]
        ends.sort(key=lambda entry: entry[0], reverse=True)
        return [block for _, block in ends]

    # -- progress --

    def note_full_block(self, seq: TokenSequence) -> None:
        """Queue a sequence that has filled at least one more block, and release what its windows have left behind."""
        if self.enable_prefix_caching:
            self._uncached.append(seq)
        for cache in self._with_window:
            first_read = cache.group.first_block(seq.num_computed_tokens) * cache.group.block_size
            self._cache_full_blocks(seq, first_read // self.block_size)
            cache.drop_behind_window(seq)

    def cache_queued_blocks(self, num_tokens: int) -> None:
        """Cache the share of a step that computed `num_tokens`: what a step like it fills on average, a quarter of the
        queue, or `_HASH_AT_LEAST` blocks, whichever is most."""
        queue = self._uncached
        left = max(_HASH_AT_LEAST, len(queue) // 4, num_tokens // self.block_size)
        while queue and left > 0:
            seq = queue[0]
            cached = seq.num_cached_blocks
            full = self._num_full_blocks(seq)
            self._cache_full_blocks(seq, min(full, cached + left))
            left -= max(1, seq.num_cached_blocks - cached)
            if seq.num_cached_blocks >= full:
                queue.popleft()

    def _num_full_blocks(self, seq: TokenSequence) -> int:
        """Of the finest group."""
        return seq.num_computed_tokens // self.block_size

    def _cache_full_blocks(self, seq: TokenSequence, until: int) -> None:
        """Cache in all groups what ends with one of the first `until` blocks of the finest."""
        if not self.enable_prefix_caching:
            return
        for index in range(seq.num_cached_blocks, until):
            num_tokens = (index + 1) * self.block_size
            block_hash = self._hasher.block_hash(seq, num_tokens)
            for cache in self.groups:
                cache.cache_full_block(seq, num_tokens, block_hash)
            seq.num_cached_blocks = index + 1
