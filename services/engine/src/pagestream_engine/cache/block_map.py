"""Which sequences hold which blocks: a map of the pool, made when it is asked for."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.plan import NO_BLOCK
from pagestream_engine.request import TokenSequence

MOST_CELLS = 4096
"""Of a map. A larger pool is sampled at equal distances."""
MOST_SEQUENCES = 256
"""Listed in a map."""
MOST_HOLDERS = 8
"""Listed for a block."""
FREE, CACHED, HELD = 0, 1, 2
"""A cell: of a free block without a hash, of a free block with one, and HELD + i of a block that `holders[i]` hold."""


class Holders(NamedTuple):
    """Who holds a referenced block."""

    sequences: tuple[int, ...]
    """Places in `BlockMap.sequences`, ascending: the first MOST_HOLDERS of those that are listed there."""
    num_references: int
    """Its reference count: block tables, listed or not, and copies of it that the next step makes."""


class RunningSequence(NamedTuple):
    """A sequence that is admitted."""

    seq_id: str
    tenant: str
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output."""
    num_computed_tokens: int
    num_blocks: int
    """Of all its tables; 0 while it waits for the leader of its group."""

    @property
    def is_prefill(self) -> bool:
        """Whether more than its next token is to be computed."""
        return self.num_tokens - self.num_computed_tokens > 1


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The pool between two steps. Bounded: at most about 60 kB."""

    num_blocks: int
    num_free: int
    """Blocks that nothing references, cached ones included."""
    num_cached: int
    """Free blocks that the prefix cache can still find."""
    cells: Sequence[int]
    """See FREE. Cell c of n is block `c * num_blocks // n`."""
    holders: Sequence[Holders]
    """Each once."""
    sequences: Sequence[RunningSequence]
    """The first MOST_SEQUENCES that run."""
    num_running: int
    num_waiting: int


def block_map(pool: BlockPool, running: Iterable[TokenSequence], *, num_running: int, num_waiting: int) -> BlockMap:
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


def _running(seq: TokenSequence) -> RunningSequence:
    num_blocks = sum(len(table) - table.count(NO_BLOCK) for table in seq.block_tables)
    return RunningSequence(
        seq.seq_id, seq.tenant, seq.num_prompt_tokens, len(seq.token_ids), seq.num_computed_tokens, num_blocks
    )
