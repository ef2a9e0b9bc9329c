"""Blocks that forked sequences share and must not both write: who gets a copy, and what is to be copied."""

from __future__ import annotations

from typing import NamedTuple

from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.request.sequence import Sequence


class BlockCopy(NamedTuple):
    """Keys and values of one block that become those of another, in all layers."""

    source: int
    target: int


class CopyOnWrite:
    """Forked sequences whose last block is not theirs alone, until each has one of its own.

    `assign_own_blocks` gives out the blocks; the copies are due before the next step computes. Until `note_copied` a
    copy holds a reference to its source, so that a failed step can run again although sequences have left in between.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._forked: list[Sequence] = []
        self._due: list[tuple[Sequence, BlockCopy]] = []

    @property
    def copies(self) -> list[BlockCopy]:
        """What is to be copied before the next step computes."""
        return [copy for _, copy in self._due]

    @property
    def forked(self) -> list[Sequence]:
        """Sequences that share their last block, which they will write."""
        return self._forked

    def add(self, seq: Sequence) -> None:
        """Note a running sequence that shares the last block of its table, and has not filled it."""
        self._forked.append(seq)

    def num_blocks_wanted(self) -> int:
        """Blocks that `assign_own_blocks` takes."""
        return len(self._without_own_block()) if self._forked else 0

    def assign_own_blocks(self) -> None:
        """Give every forked sequence a last block of its own; the caller has seen to it that enough are free."""
        for seq in self._without_own_block():
            copy = BlockCopy(seq.block_table[-1], self._pool.allocate())
            seq.block_table[-1] = copy.target
            self._due.append((seq, copy))
        self._forked.clear()

    def note_copied(self) -> None:
        """Note that the copies have been made."""
        for _, copy in self._due:
            self._pool.release(copy.source)
        self._due.clear()

    def forget(self, seq: Sequence) -> None:
        """Drop a sequence that is about to release its blocks."""
        if seq in self._forked:
            self._forked.remove(seq)
        for entry in [entry for entry in self._due if entry[0] is seq]:
            self._due.remove(entry)
            self._pool.release(entry[1].source)

    def __bool__(self) -> bool:
        return bool(self._forked or self._due)

    def _without_own_block(self) -> list[Sequence]:
        """Holders of a shared block; its last holder only where the prefix cache can find the block."""
        holders: dict[int, int] = {}
        wanting = []
        for seq in self._forked:
            block = seq.block_table[-1]
            left = holders.setdefault(block, self._pool.ref_counts[block])
            if left > 1 or self._pool.hashes[block] is not None:
                wanting.append(seq)
                holders[block] = left - 1
        return wanting
