"""Block tables of sequences over one pool, in all KV groups, and the prefix cache.

Full blocks are found by a chain of SHA-256 over a sequence's tokens. Forked sequences share blocks; one that they would
both write is copied first.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import abc, deque
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from pagestream_engine.kv_cache.block_pool import BlockPool
from pagestream_engine.kv_cache.host_tier import HostTier
from pagestream_engine.plan import NO_BLOCK, TO_LOAD, BlockCopy, KVGroup, KVLayout
from pagestream_engine.request import Sequence
from pagestream_engine.sampling_params import OF_WHOLE_PROMPTS

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
        self.uncached: deque[Sequence] = deque()
        """Sequences with full blocks that wait to be hashed."""

    # -- how much it takes --

    def num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that the tables lack to cover the first `num_tokens`."""
        return sum([cache.num_missing_blocks(seq, num_tokens) for cache in self.groups])

    def num_next_blocks(self, sequences: list[Sequence]) -> int:
        """Blocks that `allocate_next_slots` takes for sequences that need a block (see `Scheduler.schedule`)."""
        if len(self.groups) == 1:
            return len(sequences)
        return sum([self.num_missing_blocks(seq, seq.num_sent_tokens + 1) for seq in sequences])

    def num_fitting_tokens(self, seq: Sequence, most: int) -> int:
        """How many of a sequence's next tokens the free blocks can cover, up to `most`."""
        sent, free = seq.num_sent_tokens, self.pool.num_free
        if self.num_missing_blocks(seq, sent + most) <= free:
            return most
        return bisect_right(range(1, most), free, key=lambda count: self.num_missing_blocks(seq, sent + count))

    def num_promised_blocks(self, seq: Sequence, chunk: int, prefix: CachedPrefix | None = None) -> int:
        """Blocks that a sequence has yet to take until its present tokens are computed, in chunks of at most `chunk`.

        Args:
            prefix: what it has instead of its tables.
        """
        tables = seq.block_tables if prefix is None else prefix.tables
        return sum(
            cache.num_promised_blocks(seq, table, chunk) for cache, table in zip(self.groups, tables, strict=True)
        )

    def num_own_blocks(self, num_shared_tokens: int, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence of `num_tokens` takes beside those that it shares with its leader."""
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

    def get_computed_blocks(self, seq: Sequence, most: int | None = None, *, may_load: bool = False) -> CachedPrefix:
        """Return the longest cached prefix of a sequence.

        Args:
            seq: without blocks.
            most: tokens of the longest prefix that is wanted.
            may_load: whether blocks in host memory count.
        """
        most_tokens = 0
        if self.enable_prefix_caching and not (seq.wants_prompt_logprobs or seq.params.pooling in OF_WHOLE_PROMPTS):
            most_tokens = len(seq.token_ids) - 1 if most is None else min(len(seq.token_ids) - 1, most)
        num_tokens = 0
        if most_tokens >= self._alignment:
            num_tokens = self._common_hit(seq, most_tokens, may_load=may_load)
        if num_tokens == 0:
            return CachedPrefix(0, [[] for _ in self.groups], most_tokens)
        return CachedPrefix(num_tokens, [cache.cached_table(seq, num_tokens) for cache in self.groups], most_tokens)

    def next_block_hash(self, seq: Sequence, num_tokens: int) -> bytes | None:
        """Return the hash of the block that would continue a cached prefix of so many tokens; None where none can."""
        end = (num_tokens // self._alignment + 1) * self._alignment
        if not self.enable_prefix_caching or end > len(seq.token_ids) - 1:
            return None
        return self._hasher.block_hash(seq, end)

    def touch_prefix(self, seq: Sequence, prefix: CachedPrefix) -> None:
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
        seq.num_published_blocks = prefix.num_tokens // self.block_size
        seq.num_computed_tokens = prefix.num_tokens
        if self.enable_prefix_caching and self._counts_hits_of(seq):
            self.num_query_tokens += len(seq.token_ids)
            self.num_hit_tokens += prefix.num_tokens

    @staticmethod
    def _counts_hits_of(seq: Sequence) -> bool:
        """Whether what the cache has of a sequence is a hit. What it, or a choice of the same prompt, has computed
        before it lost its blocks, or what another engine has generated of it, is found again, and saves nobody's work.
        """
        return not seq.request.was_admitted and len(seq.token_ids) == seq.num_prompt_tokens

    def _common_hit(self, seq: Sequence, num_tokens: int, *, may_load: bool) -> int:
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

    def allocate_slots(self, seq: Sequence, num_tokens: int) -> None:
        """Extend the tables to cover the first `num_tokens`; the caller has seen to it that blocks are free."""
        for cache in self.groups:
            cache.allocate_slots(seq, num_tokens)

    def allocate_next_slots(self, sequences: list[Sequence]) -> None:
        """Extend the tables to cover one more token of each; the caller has seen to it that blocks are free."""
        for cache in self.groups:
            cache.allocate_next_slots(sequences)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a sequence without blocks share those of its first tokens, which `parent` has too, and has computed.

        Where the last block is not full, it is shared only until `copy_on_write.assign_own_blocks`.
        """
        for cache in self.groups:
            if cache.share(parent, child, num_tokens):
                self.copy_on_write.add(child, cache.index)
        num_full = num_tokens // self.block_size
        child.block_hashes.extend(parent.block_hashes[len(child.block_hashes) : num_full])
        child.num_published_blocks = min(parent.num_published_blocks, num_full)
        child.num_computed_tokens = num_tokens

    def free(self, seq: Sequence) -> None:
        """Cache what is full, and release all blocks: the end of the prefix is evicted before its beginning."""
        if self.copy_on_write.is_pending:
            self.copy_on_write.forget(seq)
        if self.tier is not None:
            self.tier.forget(seq)
        if seq.num_computed_tokens:
            self._cache_full_blocks(seq, self._num_full_blocks(seq))
        for block in self._from_end_to_beginning(seq):
            self.pool.release(block)
        for table in seq.block_tables:
            table.clear()
        seq.num_published_blocks = 0
        seq.num_computed_tokens = 0
        seq.num_in_flight_tokens = 0

    def _from_end_to_beginning(self, seq: Sequence) -> Iterable[int]:
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

    def note_full_block(self, seq: Sequence) -> None:
        """Queue a sequence that has filled at least one more block, and release what its windows have left behind."""
        if self.enable_prefix_caching:
            self.uncached.append(seq)
        for cache in self._with_window:
            first_read = cache.group.first_block(seq.num_computed_tokens) * cache.group.block_size
            self._cache_full_blocks(seq, first_read // self.block_size)
            # Only for a step that was collected: one in flight still reads these blocks.
            cache.drop_behind_window(seq)

    def cache_queued_blocks(self, num_tokens: int) -> None:
        """Cache the share of a step that computed `num_tokens`: what a step like it fills on average, a quarter of the
        queue, or `_HASH_AT_LEAST` blocks, whichever is most."""
        queue = self.uncached
        left = max(_HASH_AT_LEAST, len(queue) // 4, num_tokens // self.block_size)
        while queue and left > 0:
            seq = queue[0]
            cached = seq.num_published_blocks
            full = self._num_full_blocks(seq)
            self._cache_full_blocks(seq, min(full, cached + left))
            left -= max(1, seq.num_published_blocks - cached)
            if seq.num_published_blocks >= full:
                queue.popleft()

    def _num_full_blocks(self, seq: Sequence) -> int:
        """Of the finest group."""
        return seq.num_computed_tokens // self.block_size

    def _cache_full_blocks(self, seq: Sequence, until: int) -> None:
        """Cache in all groups what ends with one of the first `until` blocks of the finest."""
        if not self.enable_prefix_caching:
            return
        for index in range(seq.num_published_blocks, until):
            num_tokens = (index + 1) * self.block_size
            block_hash = self._hasher.block_hash(seq, num_tokens)
            for cache in self.groups:
                cache.cache_full_block(seq, num_tokens, block_hash)
            seq.num_published_blocks = index + 1


def fragmentation(cache: CacheManager, sequences: Iterable[Sequence]) -> float:
    """The share of the slots in referenced blocks that hold no token, between two steps; 0 without such blocks.

    Slots that a step in flight fills count as filled, and those behind a window until their block is released. What
    layers leave unused of each block is `KVLayout.padding`.

    Args:
        cache: whose blocks are looked at.
        sequences: all that hold blocks. Of each the last block of each KV group can be partly filled; after a step that
            ran out of memory also those before it, which it holds for a chunk that has become smaller.
    """
    unused: dict[int, float] = {}
    sequences = list(sequences)
    for index in range(len(cache.layout.groups)):
        _note_unused(unused, cache, index, sequences)
    used = cache.pool.num_blocks - cache.pool.num_free
    return sum(unused.values()) / used if used else 0.0


def _note_unused(unused: dict[int, float], cache: CacheManager, index: int, sequences: abc.Sequence[Sequence]) -> None:
    """Set the unused share of each block of one KV group that is not full."""
    size = cache.layout.groups[index].block_size
    for seq in sequences:
        table = seq.block_tables[index]
        filled = seq.num_sent_tokens / size
        for place in range(int(filled), len(table)):
            here = min(1.0, place + 1 - filled)
            unused[table[place]] = min(here, unused.get(table[place], here))  # siblings may have come less far in it
    shared = {fork.table[-1]: len(fork.table) - 1 for fork in cache.copy_on_write.forks if fork.group == index}
    for block, place in shared.items():  # ... which one of them has filled, and is past
        past = (seq for seq in sequences if seq.num_sent_tokens >= (place + 1) * size)
        if any(seq.block_tables[index][place] == block for seq in past):
            unused.pop(block, None)


_ROOT = b"pagestream/prefix/1"


class BlockHasher:
    """Hashes full blocks of one size, each with the hash of the block before it: equal hashes are equal prefixes.

    They are the same on every machine.
    """

    def __init__(self, block_size: int, *, separates_outputs: bool = False) -> None:
        """`separates_outputs` is the layout's: a block with outputs, and all after it, then have other hashes than the
        same tokens in a prompt, and than after a prompt of another length."""
        self.block_size = block_size
        self._separates_outputs = separates_outputs
        self._pack = struct.Struct(f"<{block_size}I").pack

    def root(self, extra_key: bytes = b"") -> bytes:
        """Return the parent of a first block. Sequences with another extra key (adapter, tenant salt) share nothing."""
        return sha256(_ROOT + extra_key, usedforsecurity=False).digest()

    def hash_block_tokens(self, parent: bytes, token_ids: abc.Sequence[int]) -> bytes:
        """Return the hash of a full block that follows the one with the hash `parent`."""
        return sha256(parent + self._pack(*token_ids), usedforsecurity=False).digest()

    def block_hash(self, seq: Sequence, num_tokens: int) -> bytes:
        """Return the hash of the block that ends with a sequence's first `num_tokens`, a multiple of the block size.

        Larger blocks that end there have it too. Each link of the chain is computed once and kept in
        `seq.block_hashes`: tokens are appended to a sequence, and never changed.
        """
        hashes, size = seq.block_hashes, self.block_size
        while len(hashes) * size < num_tokens:
            hashes.append(self.hash_next_block(seq, len(hashes) * size, hashes[-1] if hashes else None))
        return hashes[num_tokens // size - 1]

    def hash_next_block(self, seq: Sequence, start: int, parent: bytes | None) -> bytes:
        """Return the hash of a sequence's full block that begins with token `start`, after the one with the hash
        `parent`; None: the first."""
        parent = self.root(seq.request.prefix_key) if parent is None else parent
        if self._separates_outputs and start <= seq.num_prompt_tokens < start + self.block_size:
            parent += seq.num_prompt_tokens.to_bytes(8, "little")
        return self.hash_block_tokens(parent, seq.token_ids[start : start + self.block_size])


class GroupCache:
    """Grows, shares and shortens `seq.block_tables[index]`, and finds its cached blocks.

    A table has a place for each block from the sequence's first token on. Places before `KVGroup.first_block` may be
    NO_BLOCK; all others hold a block.
    """

    def __init__(
        self, pool: BlockPool, index: int, group: KVGroup, hasher: BlockHasher, tier: HostTier | None = None
    ) -> None:
        """Make the tables of a layout's group.

        Args:
            hasher: of the layout's smallest blocks.
        """
        self._tier = tier
        self.index = index
        self.group = group
        self._pool = pool
        self._hasher = hasher
        self._suffix = b"" if index == 0 else index.to_bytes(2, "little")

    def table(self, seq: Sequence) -> list[int]:
        """This group's block table of a sequence."""
        return seq.block_tables[self.index]

    # -- how much it takes --

    def num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that the table lacks to cover the first `num_tokens`."""
        return self.group.num_blocks_for(num_tokens) - len(seq.block_tables[self.index])

    def num_promised_blocks(self, seq: Sequence, table: list[int], chunk: int) -> int:
        """Blocks that a sequence has yet to take for its present tokens, beyond those of `table`, at the moment when it
        holds most."""
        if self.group.spec.window is None:
            num_held = len(table)
        else:
            # What others hold too is not free again when this one has left it behind.
            ref_counts = self._pool.ref_counts
            num_held = sum(1 for block in table if block == TO_LOAD or (block != NO_BLOCK and ref_counts[block] <= 1))
        return max(0, self.group.max_blocks_held(len(seq), chunk) - num_held)

    def num_own_blocks(self, num_shared_tokens: int, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence takes beside those that it shares: full blocks of its first `num_shared_tokens`, but
        none in a window, as it may hold them when the others have left them behind."""
        if self.group.spec.window is not None:
            return self.group.max_blocks_held(num_tokens, chunk)
        return self.group.num_blocks_for(num_tokens) - num_shared_tokens // self.group.block_size

    # -- tables --

    def allocate_slots(self, seq: Sequence, num_tokens: int) -> None:
        """Extend the table to cover the first `num_tokens`."""
        table = seq.block_tables[self.index]
        for _ in range(self.group.num_blocks_for(num_tokens) - len(table)):
            table.append(self._pool.allocate())

    def allocate_next_slots(self, sequences: list[Sequence]) -> None:
        """Extend the tables to cover one more token of each."""
        index, size, allocate = self.index, self.group.block_size, self._pool.allocate
        for seq in sequences:
            table = seq.block_tables[index]
            if seq.num_sent_tokens == len(table) * size:
                table.append(allocate())

    def share(self, parent: Sequence, child: Sequence, num_tokens: int) -> bool:
        """Give a child without blocks those of its first tokens, which its parent has computed, and still holds.

        Return whether the last of them is not full.
        """
        first, end = self.group.first_block(num_tokens), self.group.num_blocks_for(num_tokens)
        shared = self.table(parent)[first:end]
        for block in shared:
            self._pool.touch(block)
        self.table(child).extend([NO_BLOCK] * first + shared)
        return num_tokens % self.group.block_size > 0

    def reuse(self, seq: Sequence, table: list[int]) -> None:
        """Reference blocks that were found by their hashes, as the beginning of an empty table."""
        for block in table:
            if block >= 0:
                self._pool.reuse(block)
        self.table(seq).extend(table)

    def load(self, seq: Sequence) -> None:
        """Give a table's places TO_LOAD their blocks; the caller has seen to it that enough are free."""
        table, size = self.table(seq), self.group.block_size
        for place, block in enumerate(table):
            if block == TO_LOAD and self._tier is not None:
                table[place] = self._pool.allocate()
                parent_hash = self._hash_at(seq, place - 1) if place else None
                self._tier.load(seq, table[place], self._hash_at(seq, place), (place + 1) * size, parent_hash)

    def drop_behind_window(self, seq: Sequence) -> None:
        """Release what no token that is still to be computed reads. The latest of it is evicted first."""
        table = self.table(seq)
        place = min(self.group.first_block(seq.num_computed_tokens), len(table)) - 1
        while place >= 0 and table[place] != NO_BLOCK:
            self._pool.release(table[place])
            table[place] = NO_BLOCK
            place -= 1

    # -- block hashes --

    def cache_full_block(self, seq: Sequence, num_tokens: int, block_hash: bytes) -> None:
        """Let the block that ends with the first `num_tokens` tokens be found, if there is such a block.

        Args:
            block_hash: the hasher's, of these tokens.
        """
        if num_tokens % self.group.block_size == 0:
            place = num_tokens // self.group.block_size - 1
            block = seq.block_tables[self.index][place]
            own_hash = self._with_group(block_hash)
            if block != NO_BLOCK and own_hash not in self._pool.by_hash:
                parent_hash = self._hash_at(seq, place - 1) if place else None
                self._pool.cache_full_block(block, own_hash, num_tokens, parent_hash)

    def longest_hit(self, seq: Sequence, num_tokens: int, alignment: int, *, may_load: bool = False) -> int:
        """Tokens of the longest prefix that can go on: the pool has all of its blocks that attention still reads.

        Args:
            num_tokens: at most so many.
            alignment: the result is a multiple of it, as it is of the block size.
            may_load: whether blocks in host memory count.
        """
        size = self.group.block_size
        end = num_tokens // alignment * alignment
        while end > 0:
            missing = self._first_missing(seq, self.group.first_block(end), end // size, may_load=may_load)
            if missing is None:
                return end
            end = missing * size // alignment * alignment  # Each longer prefix reads the missing block too.
        return 0

    def cached_table(self, seq: Sequence, num_tokens: int) -> list[int]:
        """The table of a prefix that `longest_hit` has found, with TO_LOAD for blocks that host memory has."""
        first, end = self.group.first_block(num_tokens), num_tokens // self.group.block_size
        by_hash = self._pool.by_hash
        return [NO_BLOCK] * first + [by_hash.get(self._hash_at(seq, place), TO_LOAD) for place in range(first, end)]

    def most_held(self, seq: Sequence, table: list[int], num_tokens: int) -> tuple[int, list[bytes]]:
        """Bound the blocks of a cached prefix that running sequences hold, and that cost another no free block.

        Args:
            table: of the prefix of all groups; this group's own may be longer.
            num_tokens: of the longest prefix that is wanted.

        Returns:
            At most so many, and the block hashes of which none must be cached or touched anew for that. In a window all
            that fit count, whatever holds them.
        """
        if self.group.spec.window is not None:
            return self.group.num_blocks_for(self.group.spec.window - 1), []
        end = num_tokens // self.group.block_size
        missing = self._first_missing(seq, len(table), end, may_load=True)
        known = end if missing is None else missing
        by_hash, ref_counts = self._pool.by_hash, self._pool.ref_counts
        hashes = [self._hash_at(seq, place) for place in range(min(known + 1, end))]
        blocks = table + [by_hash.get(block_hash, TO_LOAD) for block_hash in hashes[len(table) : known]]
        return sum(1 for block in blocks if block != TO_LOAD and ref_counts[block]), hashes

    def _first_missing(self, seq: Sequence, first: int, end: int, *, may_load: bool) -> int | None:
        by_hash, tier = self._pool.by_hash, self._tier if may_load else None
        for place in range(first, end):
            block_hash = self._hash_at(seq, place)
            if block_hash not in by_hash and (tier is None or block_hash not in tier):
                return place
        return None

    def _hash_at(self, seq: Sequence, place: int) -> bytes:
        return self._with_group(self._hasher.block_hash(seq, (place + 1) * self.group.block_size))

    def _with_group(self, block_hash: bytes) -> bytes:
        """Return the pool's hash of a block of this group: each group has keys and values of its own of the tokens."""
        return block_hash + self._suffix


class Fork(NamedTuple):
    """A sequence that shares the last block of one of its tables, which it will write."""

    seq: Sequence
    group: int
    """Index of the KV group."""

    @property
    def table(self) -> list[int]:
        """The table whose last block is shared."""
        return self.seq.block_tables[self.group]


class CopyOnWrite:
    """Forked sequences whose last block is not theirs alone, until each has one of its own.

    `assign_own_blocks` gives out the blocks; the copies are due before the next step computes. Until `note_copied` a
    copy holds a reference to its source, so that a failed step can run again although sequences have left in between.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._forks: list[Fork] = []
        self._due: list[tuple[Sequence, BlockCopy]] = []
        self.is_pending = False
        """Whether there is a fork, or a copy that is due."""

    @property
    def copies(self) -> list[BlockCopy]:
        """What is to be copied before the next step computes."""
        return [copy for _, copy in self._due]

    @property
    def forks(self) -> list[Fork]:
        """Sequences that share their last block in a group, and will write it."""
        return self._forks

    def add(self, seq: Sequence, group: int) -> None:
        """Note a running sequence that shares the last block of a table, and has not filled it."""
        self._forks.append(Fork(seq, group))
        self.is_pending = True

    def num_blocks_wanted(self) -> int:
        """Blocks that `assign_own_blocks` takes."""
        return len(self._without_own_block()) if self._forks else 0

    def assign_own_blocks(self) -> None:
        """Give every fork a last block of its own; the caller has seen to it that enough are free."""
        for fork in self._without_own_block():
            copy = BlockCopy(fork.table[-1], self._pool.allocate())
            fork.table[-1] = copy.target
            self._due.append((fork.seq, copy))
        self._forks.clear()
        self.is_pending = bool(self._due)

    def note_copied(self) -> None:
        """Note that the copies have been made."""
        for _, copy in self._due:
            self._pool.release(copy.source)
        self._due.clear()
        self.is_pending = bool(self._forks)

    def forget(self, seq: Sequence) -> None:
        """Drop a sequence that is about to release its blocks."""
        self._forks = [fork for fork in self._forks if fork.seq is not seq]
        for entry in [entry for entry in self._due if entry[0] is seq]:
            self._due.remove(entry)
            self._pool.release(entry[1].source)
        self.is_pending = bool(self._forks or self._due)

    def _without_own_block(self) -> list[Fork]:
        """Holders of a shared block; its last holder only where the prefix cache can find the block."""
        holders: dict[int, int] = {}
        wanting = []
        for fork in self._forks:
            block = fork.table[-1]
            left = holders.setdefault(block, self._pool.ref_counts[block])
            if left > 1 or self._pool.hashes[block] is not None:
                wanting.append(fork)
                holders[block] = left - 1
        return wanting
