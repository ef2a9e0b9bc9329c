"""Displacement: which running groups lose their places to one that waits, where the policy lets it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.cache.kv_groups import NO_BLOCK
from pagestream_engine.request.sequence import SequenceGroup
from pagestream_engine.scheduler.admission import Admission
from pagestream_engine.scheduler.policy import SchedulingPolicy


def displaced_groups(
    head: SequenceGroup,
    by_victim_rank: Sequence[SequenceGroup],
    policy: SchedulingPolicy,
    admission: Admission,
    pool: BlockPool,
) -> list[SequenceGroup]:
    """Return the fewest groups, of the highest victim ranks, whose seats and blocks the first waiting group needs.

    None where it has room, and none where all that it may displace would not make it: their work would be lost for
    nothing. A block that others hold too counts with the last of them.

    Args:
        head: waits, and is the next to be admitted.
        by_victim_rank: the running groups.
        policy: says whom `head` may displace.
        admission: says what it lacks.
        pool: says how often blocks are held.
    """
    first = head.members[0]
    candidates = [group for group in reversed(by_victim_rank) if policy.may_displace(first, group.members[0])]
    if not candidates:
        return []
    num_seats, num_blocks = admission.num_missing(head)
    chosen, dropped = list[SequenceGroup](), Counter[int]()
    for group in candidates:
        if num_seats <= 0 and num_blocks <= 0:
            return chosen
        chosen.append(group)
        num_seats -= len(group.members)
        for block in chain.from_iterable(table for seq in group.members for table in seq.block_tables):
            if block != NO_BLOCK:  # as behind a window
                dropped[block] += 1
                num_blocks -= dropped[block] == pool.ref_counts[block]
    return chosen if num_seats <= 0 and num_blocks <= 0 else []
