"""What must always be true of the pool and the tables; checked after every step in tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagestream_engine.cache.block_pool import BlockHasher, BlockPool
from pagestream_engine.cache.copies import CopyOnWrite
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.request.sequence import Sequence, SequenceState


def check_cache(
    pool: BlockPool, block_size: int, sequences: Iterable[Sequence], copy_on_write: CopyOnWrite | None = None
) -> None:
    """Check the pool against every sequence that may hold blocks.

    Raises:
        InvariantViolation: names the first contradiction.
    """
    sequences = list(sequences)
    forks = CopyOnWrite(pool) if copy_on_write is None else copy_on_write
    _check_references(pool, sequences, [copy.source for copy in forks.copies])
    _check_content_map(pool)
    for seq in sequences:
        _check_table(pool, block_size, seq)
    _check_writers(block_size, sequences, forks)


def _check_references(pool: BlockPool, sequences: list[Sequence], sources: list[int]) -> None:
    free = list(pool.free_list)
    _require(len(free) == len(set(free)) == pool.num_free, "the free list repeats a block, or its length is wrong")
    referenced = Counter(block for seq in sequences for block in seq.block_table)
    referenced.update(sources)
    members = set(free)
    for block in range(pool.num_blocks):
        count = pool.ref_counts[block]
        _require((block in members) == (count == 0), f"block {block} is free and referenced, or neither")
        _require((block in pool.free_list) == (block in members), f"block {block} has a stray link")
        _require(
            count == referenced[block], f"block {block} has count {count}, tables hold it {referenced[block]} times"
        )


def _check_content_map(pool: BlockPool) -> None:
    for content, block in pool.by_hash.items():
        _require(pool.hashes[block] == content, f"block {block} is found by a hash that it does not carry")
    known = sum(1 for content in pool.hashes if content is not None)
    _require(known == len(pool.by_hash), "a block carries a hash by which it is not found")
    cached = sum(1 for block in pool.free_list if pool.hashes[block] is not None)
    _require(pool.num_cached == cached, f"{pool.num_cached} free blocks are said to be cached, {cached} are")


def _check_table(pool: BlockPool, block_size: int, seq: Sequence) -> None:
    table = seq.block_table
    if seq.state is not SequenceState.RUNNING:
        _require(not table and seq.num_computed_tokens == 0, f"{seq!r} does not run, yet holds blocks")
        return
    _require(len(set(table)) == len(table), f"{seq!r} holds a block twice")
    _require(seq.num_computed_tokens <= len(table) * block_size, f"{seq!r} computed more tokens than its table covers")
    _require(seq.num_computed_tokens < len(seq.token_ids), f"{seq!r} runs without a token to compute")
    _require(len(table) <= -(-len(seq.token_ids) // block_size), f"{seq!r} holds more than one partly filled block")
    _require(seq.num_published_blocks <= seq.num_computed_tokens // block_size, f"{seq!r} published a block too early")
    hasher = BlockHasher(block_size)
    content = hasher.root(seq.cache_salt)
    for index in range(seq.num_published_blocks):
        content = hasher.child(content, seq.token_ids[index * block_size : (index + 1) * block_size])
        _require(pool.hashes[table[index]] in (None, content), f"{seq!r} shares a block of other content")


def _check_writers(block_size: int, sequences: list[Sequence], forks: CopyOnWrite) -> None:
    """No block that some sequence will write is held by another, but for what `CopyOnWrite.part` will give an own."""
    holders: dict[int, list[Sequence]] = {}
    for seq in sequences:
        for block in seq.block_table:
            holders.setdefault(block, []).append(seq)
    for seq in sequences:
        for block in seq.block_table[seq.num_computed_tokens // block_size :]:
            others = [other for other in holders[block] if other is not seq and other not in forks.forked]
            _require(seq in forks.forked or not others, f"{seq!r} will write block {block}, which others hold")
    targets = {copy.target for copy in forks.copies}
    _require(len(targets) == len(forks.copies), "a block is to be copied to twice")
    _require(targets <= holders.keys(), "a block is the target of a copy, and no sequence holds it")


def _require(holds: bool, contradiction: str) -> None:
    if not holds:
        raise InvariantViolation(contradiction)
