"""The cache as it is seen from outside, between two steps: its map, and what must always be true."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import islice

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.kv_cache.block_pool import BlockPool
from pagestream_engine.kv_cache.host_tier import HostTier
from pagestream_engine.kv_cache.manager import BlockHasher, CopyOnWrite
from pagestream_engine.plan import NO_BLOCK, KVGroup, KVLayout
from pagestream_engine.request import Sequence, SequenceState
from pagestream_engine.stats import (
    CACHED,
    FREE,
    HELD,
    MOST_CELLS,
    MOST_HOLDERS,
    MOST_SEQUENCES,
    BlockMap,
    Holders,
    RunningSequence,
)


def check_cache(
    pool: BlockPool,
    layout: KVLayout,
    sequences: Iterable[Sequence],
    copy_on_write: CopyOnWrite | None = None,
    *,
    num_drafts: int = 0,
    tier: HostTier | None = None,
) -> None:
    """Check the pool against every sequence that may hold blocks, each for up to `num_drafts` tokens that it has not.

    Raises:
        InvariantViolation: names the first contradiction.
    """
    sequences = list(sequences)
    shared = CopyOnWrite(pool) if copy_on_write is None else copy_on_write
    _check_references(pool, sequences, [copy.source for copy in shared.copies])
    _check_hash_map(pool)
    hasher = BlockHasher(layout.block_size, separates_outputs=layout.separates_outputs)
    for seq in sequences:
        _require(len(seq.block_tables) == len(layout.groups), f"{seq!r} has not one table for each KV group")
        for index, group in enumerate(layout.groups):
            _check_table(seq, seq.block_tables[index], group, layout.block_size, num_drafts)
            _check_hashes(pool, seq, seq.block_tables[index], group, hasher)
    _check_writers(layout, sequences, shared)
    contradiction = None if tier is None else tier.check()
    _require(contradiction is None, str(contradiction))


def _check_references(pool: BlockPool, sequences: list[Sequence], sources: list[int]) -> None:
    free = list(pool.free_blocks)
    _require(len(free) == len(set(free)) == pool.num_free, "the free list repeats a block, or its length is wrong")
    held = [[block for table in seq.block_tables for block in table if block != NO_BLOCK] for seq in sequences]
    for seq, blocks in zip(sequences, held, strict=True):
        _require(len(set(blocks)) == len(blocks), f"{seq!r} holds a block twice")
    referenced = Counter(block for blocks in held for block in blocks)
    referenced.update(sources)
    members = set(free)
    for block in range(pool.num_blocks):
        count = pool.ref_counts[block]
        _require((block in members) == (count == 0), f"block {block} is free and referenced, or neither")
        _require((block in pool.free_blocks) == (block in members), f"block {block} has a stray link")
        _require(
            count == referenced[block], f"block {block} has count {count}, tables hold it {referenced[block]} times"
        )


def _check_hash_map(pool: BlockPool) -> None:
    for block_hash, block in pool.by_hash.items():
        _require(pool.hashes[block] == block_hash, f"block {block} is found by a hash that it does not carry")
    known = sum(1 for block_hash in pool.hashes if block_hash is not None)
    _require(known == len(pool.by_hash), "a block carries a hash by which it is not found")
    cached = sum(1 for block in pool.free_blocks if pool.hashes[block] is not None)
    _require(pool.num_cached == cached, f"{pool.num_cached} free blocks are said to be cached, {cached} are")


def _check_table(seq: Sequence, table: list[int], group: KVGroup, finest_block_size: int, num_drafts: int) -> None:
    computed, size = seq.num_computed_tokens, group.block_size
    if seq.state is not SequenceState.RUNNING:
        _require(not table and computed == 0, f"{seq!r} does not run, yet holds blocks")
        return
    _require(computed <= len(table) * size, f"{seq!r} computed more tokens than its table covers")
    _require(computed < len(seq.token_ids), f"{seq!r} runs without a token to compute")
    _require(seq.num_sent_tokens <= len(seq), f"{seq!r} is to compute tokens that it will not have")
    # Two steps in flight have taken room for a token and its drafts each, and may both have given none.
    num_unused = 2 * num_drafts + 1 if num_drafts else 0
    _require(
        len(table) <= group.num_blocks_for(len(seq) + num_unused), f"{seq!r} holds more than one partly filled block"
    )
    held = [block != NO_BLOCK for block in table]
    _require(all(held[group.first_block(computed) :]), f"{seq!r} lacks a block that attention reads")
    # Windows are looked at where the finest group's blocks end.
    behind = group.first_block(computed // finest_block_size * finest_block_size)
    _require(not any(held[:behind]), f"{seq!r} holds a block behind its window")
    chunk = len(table) * size - computed
    _require(
        sum(held) <= group.max_blocks_held(len(seq) + num_unused, chunk), f"{seq!r} holds more than its window takes"
    )


def _check_hashes(pool: BlockPool, seq: Sequence, table: list[int], group: KVGroup, hasher: BlockHasher) -> None:
    end_of_cached = seq.num_published_blocks * hasher.block_size
    _require(end_of_cached <= seq.num_computed_tokens, f"{seq!r} cached a block too early")
    block_hash = None
    for end in range(hasher.block_size, end_of_cached + 1, hasher.block_size):
        block_hash = hasher.hash_next_block(seq, end - hasher.block_size, block_hash)
        if end % group.block_size == 0 and table[end // group.block_size - 1] != NO_BLOCK:
            known = pool.hashes[table[end // group.block_size - 1]]
            _require(known is None or known.startswith(block_hash), f"{seq!r} shares a block of other tokens")


def _check_writers(layout: KVLayout, sequences: list[Sequence], shared: CopyOnWrite) -> None:
    """No block that some sequence will write is held by another, but for what `CopyOnWrite` will give an own."""
    holders: dict[int, list[Sequence]] = {}
    for seq in sequences:
        for table in seq.block_tables:
            for block in table:
                holders.setdefault(block, []).append(seq)
    forked = {(id(fork.seq), fork.group) for fork in shared.forks}
    for seq in sequences:
        for index, group in enumerate(layout.groups):
            for block in seq.block_tables[index][seq.num_computed_tokens // group.block_size :]:
                others = [other for other in holders[block] if other is not seq and (id(other), index) not in forked]
                is_forked = (id(seq), index) in forked
                _require(is_forked or not others, f"{seq!r} will write block {block}, which others hold")
    targets = {copy.target for copy in shared.copies}
    _require(len(targets) == len(shared.copies), "a block is to be copied to twice")
    _require(targets <= holders.keys(), "a block is the target of a copy, and no sequence holds it")


def _require(holds: bool, contradiction: str) -> None:
    if not holds:
        raise InvariantViolation(contradiction)


def block_map(pool: BlockPool, running: Iterable[Sequence], *, num_running: int, num_waiting: int) -> BlockMap:
    """Return the map of a pool; O(blocks in tables), at the speed of set intersections, and O(MOST_CELLS).

    Args:
        running: the sequences that hold its blocks.
        num_waiting: sequences that hold none.
    """
    num_cells = min(pool.num_blocks, MOST_CELLS)
    blocks = [cell * pool.num_blocks // num_cells for cell in range(num_cells)]
    counts = pool.ref_counts
    held: dict[int, list[int]] = {block: [] for block in blocks if counts[block]}
    wanted = set(held)  # blocks whose list is not full
    listed = list(islice(running, MOST_SEQUENCES))
    for place, seq in enumerate(listed):
        for table in seq.block_tables:
            for block in wanted.intersection(table):
                held[block].append(place)
                if len(held[block]) == MOST_HOLDERS:
                    wanted.discard(block)
    places: dict[Holders, int] = {}
    cells = array("H")
    for block in blocks:
        if counts[block]:
            found = Holders(tuple(held[block]), counts[block])
            cells.append(HELD + places.setdefault(found, len(places)))
        else:
            cells.append(FREE if pool.hashes[block] is None else CACHED)
    return BlockMap(
        num_blocks=pool.num_blocks,
        num_free=pool.num_free,
        num_cached=pool.num_cached,
        cells=cells,
        holders=tuple(places),
        sequences=tuple(map(_running, listed)),
        num_running=num_running,
        num_waiting=num_waiting,
    )


def _running(seq: Sequence) -> RunningSequence:
    num_blocks = sum(len(table) - table.count(NO_BLOCK) for table in seq.block_tables)
    return RunningSequence(
        seq.seq_id, seq.tenant, seq.num_prompt_tokens, len(seq.token_ids), seq.num_computed_tokens, num_blocks
    )
