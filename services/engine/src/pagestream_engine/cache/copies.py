"""Blocks that forked sequences share and must not both write: who gets a copy, and what is to be copied."""

from __future__ import annotations

from typing import NamedTuple

from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.request import TokenSequence


class BlockCopy(NamedTuple):
    """A block whose page becomes that of another, whole and in every layer slot, whichever KV group holds it."""

    source: int
    target: int


class Fork(NamedTuple):
    """A sequence that shares the last block of one of its tables, which it will write."""

    seq: TokenSequence
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
        self._due: list[tuple[TokenSequence, BlockCopy]] = []

    @property
    def copies(self) -> list[BlockCopy]:
        """What is to be copied before the next step computes."""
        return [copy for _, copy in self._due]

    @property
    def forks(self) -> list[Fork]:
        """Sequences that share their last block in a group, and will write it."""
        return self._forks

    def add(self, seq: TokenSequence, group: int) -> None:
        """Note a running sequence that shares the last block of a table, and has not filled it."""
        self._forks.append(Fork(seq, group))

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

    def note_copied(self) -> None:
        """Note that the copies have been made."""
        for _, copy in self._due:
            self._pool.release(copy.source)
        self._due.clear()

    def forget(self, seq: TokenSequence) -> None:
        """Drop a sequence that is about to release its blocks."""
        self._forks = [fork for fork in self._forks if fork.seq is not seq]
        for entry in [entry for entry in self._due if entry[0] is seq]:
            self._due.remove(entry)
            self._pool.release(entry[1].source)

    def __bool__(self) -> bool:
        return bool(self._forks or self._due)

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
