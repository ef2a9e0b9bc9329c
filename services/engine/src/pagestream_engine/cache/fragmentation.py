"""How much of the referenced blocks holds no token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.request import TokenSequence


def fragmentation(cache: CacheManager, sequences: Iterable[TokenSequence]) -> float:
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


def _note_unused(unused: dict[int, float], cache: CacheManager, index: int, sequences: Sequence[TokenSequence]) -> None:
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
