"""One KV group's block tables, over the pool that all groups share."""

from __future__ import annotations

from pagestream_engine.cache.block_hasher import BlockHasher
from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.cache.host_tier import HostTier
from pagestream_engine.plan import NO_BLOCK, TO_LOAD, KVGroup
from pagestream_engine.request import TokenSequence


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

    def table(self, seq: TokenSequence) -> list[int]:
        """This group's block table of a sequence."""
        return seq.block_tables[self.index]

    # -- how much it takes --

    def num_missing_blocks(self, seq: TokenSequence, num_tokens: int) -> int:
        """Blocks that the table lacks to cover the first `num_tokens`."""
        return self.group.num_blocks_for(num_tokens) - len(seq.block_tables[self.index])

    def num_promised_blocks(self, seq: TokenSequence, table: list[int], chunk: int) -> int:
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

    def allocate_slots(self, seq: TokenSequence, num_tokens: int) -> None:
        """Extend the table to cover the first `num_tokens`."""
        table = seq.block_tables[self.index]
        for _ in range(self.group.num_blocks_for(num_tokens) - len(table)):
            table.append(self._pool.allocate())

    def allocate_next_slots(self, sequences: list[TokenSequence]) -> None:
        """Extend the tables to cover one more token of each."""
        index, size, allocate = self.index, self.group.block_size, self._pool.allocate
        for seq in sequences:
            table = seq.block_tables[index]
            if seq.num_sent_tokens == len(table) * size:
                table.append(allocate())

    def share(self, parent: TokenSequence, child: TokenSequence, num_tokens: int) -> bool:
        """Give a child without blocks those of its first tokens, which its parent has computed, and still holds.

        Return whether the last of them is not full.
        """
        first, end = self.group.first_block(num_tokens), self.group.num_blocks_for(num_tokens)
        shared = self.table(parent)[first:end]
        for block in shared:
            self._pool.touch(block)
        self.table(child).extend([NO_BLOCK] * first + shared)
        return num_tokens % self.group.block_size > 0

    def reuse(self, seq: TokenSequence, table: list[int]) -> None:
        """Reference blocks that were found by their hashes, as the beginning of an empty table."""
        for block in table:
            if block >= 0:
                self._pool.reuse(block)
        self.table(seq).extend(table)

    def load(self, seq: TokenSequence) -> None:
        """Give a table's places TO_LOAD their blocks; the caller has seen to it that enough are free."""
        table, size = self.table(seq), self.group.block_size
        for place, block in enumerate(table):
            if block == TO_LOAD and self._tier is not None:
                table[place] = self._pool.allocate()
                parent_hash = self._hash_at(seq, place - 1) if place else None
                self._tier.load(seq, table[place], self._hash_at(seq, place), (place + 1) * size, parent_hash)

    def drop_behind_window(self, seq: TokenSequence) -> None:
        """Release what no token that is still to be computed reads. The latest of it is evicted first."""
        table = self.table(seq)
        place = min(self.group.first_block(seq.num_computed_tokens), len(table)) - 1
        while place >= 0 and table[place] != NO_BLOCK:
            self._pool.release(table[place])
            table[place] = NO_BLOCK
            place -= 1

    # -- block hashes --

    def cache_full_block(self, seq: TokenSequence, num_tokens: int, block_hash: bytes) -> None:
        """Let the block that ends with the first `num_tokens` tokens be found, if there is such a block.

        Args:
            block_hash: the hasher's, of these tokens.
        """
        if num_tokens % self.group.block_size == 0:
            place = num_tokens // self.group.block_size - 1
            block = seq.block_tables[self.index][place]
            if block != NO_BLOCK:
                parent_hash = self._hash_at(seq, place - 1) if place else None
                self._pool.cache_full_block(block, self._with_group(block_hash), num_tokens, parent_hash)

    def longest_hit(self, seq: TokenSequence, num_tokens: int, alignment: int, *, may_load: bool = False) -> int:
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

    def cached_table(self, seq: TokenSequence, num_tokens: int) -> list[int]:
        """The table of a prefix that `longest_hit` has found, with TO_LOAD for blocks that host memory has."""
        first, end = self.group.first_block(num_tokens), num_tokens // self.group.block_size
        by_hash = self._pool.by_hash
        return [NO_BLOCK] * first + [by_hash.get(self._hash_at(seq, place), TO_LOAD) for place in range(first, end)]

    def most_held(self, seq: TokenSequence, table: list[int], num_tokens: int) -> tuple[int, list[bytes]]:
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

    def _first_missing(self, seq: TokenSequence, first: int, end: int, *, may_load: bool) -> int | None:
        by_hash, tier = self._pool.by_hash, self._tier if may_load else None
        for place in range(first, end):
            block_hash = self._hash_at(seq, place)
            if block_hash not in by_hash and (tier is None or block_hash not in tier):
                return place
        return None

    def _hash_at(self, seq: TokenSequence, place: int) -> bytes:
        return self._with_group(self._hasher.block_hash(seq, (place + 1) * self.group.block_size))

    def _with_group(self, block_hash: bytes) -> bytes:
        """Return the pool's hash of a block of this group: each group has keys and values of its own of the tokens."""
        return block_hash + self._suffix
