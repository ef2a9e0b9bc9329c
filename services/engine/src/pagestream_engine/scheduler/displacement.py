"""Displacement: which running sequences lose their places to one that waits, where the policy lets it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.plan import NO_BLOCK
from pagestream_engine.request import SequenceGroup, TokenSequence
from pagestream_engine.scheduler.admission import Admission
from pagestream_engine.scheduler.policy import SchedulingPolicy

Unit = Sequence[TokenSequence]
"""Running sequences of one group that lose their places together: one, or all beams of a search."""


def displaced_units(
    head: SequenceGroup,
    by_victim_rank: Sequence[Unit],
    policy: SchedulingPolicy,
    admission: Admission,
    pool: BlockPool,
) -> list[Unit]:
    """Return the fewest units, of the highest victim ranks, whose seats and blocks the first waiting group needs.

    None where it has room. Where all that it may displace would not make room for it, they make room for half of its
    choices, or half of these, and so on: a search needs all. Where not even one would have room, none is displaced:
    their work would be lost for nothing. A block that others hold too counts with the last of them.

    Args:
        head: waits, and is the next to be admitted.
        by_victim_rank: what runs.
        policy: says whom `head` may displace.
        admission: says what it lacks.
        pool: says how often blocks are held.
    """
    first = head.members[0]
    candidates = [unit for unit in reversed(by_victim_rank) if policy.may_displace(first, unit[0])]
    if not candidates:
        return []
    count = len(head.members)
    least = count if head.is_search else 1
    while True:
        chosen = _fewest(candidates, *admission.num_missing(head, count), pool)
        if chosen is not None:
            return chosen
        if count == least:
            return []
        count //= 2


def _fewest(candidates: Sequence[Unit], num_seats: int, num_blocks: int, pool: BlockPool) -> list[Unit] | None:
    """Return the first candidates that have so many seats and blocks to themselves; None where all have not."""
    chosen, dropped = list[Unit](), Counter[int]()
    for unit in candidates:
        if num_seats <= 0 and num_blocks <= 0:
            return chosen
        chosen.append(unit)
        num_seats -= len(unit)
        for block in chain.from_iterable(table for seq in unit for table in seq.block_tables):
            if block != NO_BLOCK:  # as behind a window
                dropped[block] += 1
                num_blocks -= dropped[block] == pool.ref_counts[block]
    return chosen if num_seats <= 0 and num_blocks <= 0 else None
