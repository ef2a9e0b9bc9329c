"""What sequences ask of the pool: find a prefix, grow, release blocks, publish full ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pagestream_engine.cache.block_pool import BlockHasher, BlockPool
from pagestream_engine.cache.copies import CopyOnWrite
from pagestream_engine.request.sequence import Sequence

_PUBLISH_AT_LEAST = 32
"""Blocks that are hashed in a step however few wait: about 50 microseconds."""


class CacheManager:
    """Block tables over one pool.

    A full block is published (hashed, and found by others from then on) after its keys and values are computed.
    Publishing waits in a queue of which each step takes a share, so that many sequences that fill a block in the same
    step make no spike; what a sequence still has in the queue is published when it releases its blocks.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.copy_on_write = CopyOnWrite(pool)
        self._hasher = BlockHasher(block_size)
        self._unpublished: deque[Sequence] = deque()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that the table lacks to cover the first `num_tokens`."""
        return self.num_blocks_for(num_tokens) - len(seq.block_table)

    # -- prefix --

    def find_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks of the longest known prefix; the last token is never part of it, as it needs logits."""
        blocks: list[int] = []
        if not self.enable_prefix_caching:
            return blocks
        for index in range((len(seq.token_ids) - 1) // self.block_size):
            block = self.pool.lookup(self._hash(seq, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def next_block(self, seq: Sequence, num_blocks: int) -> bytes | None:
        """The name of the content that would continue a cached prefix of so many blocks; None where none can."""
        if not self.enable_prefix_caching or num_blocks >= (len(seq.token_ids) - 1) // self.block_size:
            return None
        return self._hash(seq, num_blocks)

    def adopt_prefix(self, seq: Sequence, blocks: list[int]) -> None:
        """References what `find_prefix` found as the beginning of an empty table."""
        for block in blocks:
            self.pool.acquire(block)
        seq.block_table.extend(blocks)
        seq.num_published_blocks = len(blocks)
        seq.num_computed_tokens = len(blocks) * self.block_size
        if self.enable_prefix_caching:
            self.num_query_tokens += len(seq.token_ids)
            self.num_hit_tokens += seq.num_computed_tokens

    def num_free_blocks_used_by(self, blocks: list[int]) -> int:
        """How many of these blocks are free now, and would no longer be once they are adopted."""
        ref_counts = self.pool.ref_counts
        return sum(1 for block in blocks if ref_counts[block] == 0)

    # -- table --

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Extend the table to cover the first `num_tokens`; the caller has seen to it that blocks are free."""
        for _ in range(self.num_missing_blocks(seq, num_tokens)):
            seq.block_table.append(self.pool.allocate())

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a sequence without blocks share those of its first tokens, which `parent` has too, and has computed.

        Where the last block is not full, it is shared only until `copy_on_write.assign_own_blocks`.
        """
        blocks = parent.block_table[: self.num_blocks_for(num_tokens)]
        for block in blocks:
            self.pool.acquire(block)
        num_full = num_tokens // self.block_size
        child.block_table.extend(blocks)
        child.block_hashes.extend(parent.block_hashes[len(child.block_hashes) : num_full])
        child.num_published_blocks = min(parent.num_published_blocks, num_full)
        child.num_computed_tokens = num_tokens
        if num_full < len(blocks):
            self.copy_on_write.add(child)

    def free(self, seq: Sequence) -> None:
        """Publish what is full, and drop all blocks: the end of the prefix is lost before its beginning."""
        if self.copy_on_write:
            self.copy_on_write.forget(seq)
        if seq.block_table:
            self._publish(seq, self._num_full_blocks(seq))
        for block in reversed(seq.block_table):
            self.pool.release(block)
        seq.block_table.clear()
        seq.num_published_blocks = 0
        seq.num_computed_tokens = 0

    # -- what it costs --

    def fragmentation(self, sequences: Iterable[Sequence]) -> float:
        """The share of the slots in referenced blocks that hold no token, between two steps; 0 without such blocks.

        `sequences` are all that hold blocks; of each only the last block can be partly filled.
        """
        size = self.block_size
        unused: dict[int, int] = {}
        sequences = list(sequences)
        for seq in sequences:
            if seq.block_table:
                last = seq.block_table[-1]
                here = len(seq.block_table) * size - seq.num_computed_tokens
                unused[last] = min(here, unused.get(last, here))  # siblings may have come less far in a shared block
        shared = {seq.block_table[-1]: len(seq.block_table) - 1 for seq in self.copy_on_write.forked}
        for block, index in shared.items():  # ... which one of them has filled, and is past
            if any(self._num_full_blocks(seq) > index and seq.block_table[index] == block for seq in sequences):
                unused.pop(block, None)
        used = self.pool.num_blocks - self.pool.num_free
        return sum(unused.values()) / (used * size) if used else 0.0

    # -- publishing --

    def note_full_block(self, seq: Sequence) -> None:
        """Queue a sequence that has filled at least one more block."""
        if self.enable_prefix_caching:
            self._unpublished.append(seq)

    def publish_some(self, num_tokens: int) -> None:
        """Publish the share of a step that computed `num_tokens`: what a step like it fills on average, a quarter of
        the queue, or `_PUBLISH_AT_LEAST` blocks, whichever is most."""
        queue = self._unpublished
        left = max(_PUBLISH_AT_LEAST, len(queue) // 4, num_tokens // self.block_size)
        while queue and left > 0:
            seq = queue[0]
            published = seq.num_published_blocks
            full = self._num_full_blocks(seq)
            self._publish(seq, min(full, published + left))
            left -= max(1, seq.num_published_blocks - published)
            if seq.num_published_blocks >= full:
                queue.popleft()

    def _num_full_blocks(self, seq: Sequence) -> int:
        return seq.num_computed_tokens // self.block_size

    def _publish(self, seq: Sequence, until: int) -> None:
        if not self.enable_prefix_caching:
            return
        for index in range(seq.num_published_blocks, until):
            self.pool.publish(seq.block_table[index], self._hash(seq, index))
            seq.num_published_blocks = index + 1

    def _hash(self, seq: Sequence, index: int) -> bytes:
        """The chained hash of a full block of `token_ids`, which never change, so that it is computed once."""
        hashes = seq.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else self._hasher.root(seq.cache_salt)
            start = len(hashes) * self.block_size
            hashes.append(self._hasher.child(parent, seq.token_ids[start : start + self.block_size]))
        return hashes[index]
