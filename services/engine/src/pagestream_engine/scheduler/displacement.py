"""Displacement: which running groups lose their places to one that waits, where the policy lets it."""

from __future__ import annotations

from collections.abc import Sequence

from pagestream_engine.request.sequence import SequenceGroup
from pagestream_engine.scheduler.admission import Admission
from pagestream_engine.scheduler.policy import SchedulingPolicy


def displaced_groups(
    head: SequenceGroup, by_victim_rank: Sequence[SequenceGroup], policy: SchedulingPolicy, admission: Admission
) -> list[SequenceGroup]:
    """Return the fewest groups, of the highest victim ranks, whose seats and blocks the first waiting group needs.

    None where it has room, and none where all that it may displace would not make it: their work would be lost for
    nothing. Blocks that several groups share count for each, so that a later step may have to displace more.

    Args:
        head: waits, and is the next to be admitted.
        by_victim_rank: the running groups.
        policy: says whom `head` may displace.
        admission: says what it lacks.
    """
    first = head.members[0]
    candidates = [group for group in reversed(by_victim_rank) if policy.may_displace(first, group.members[0])]
    if not candidates:
        return []
    num_seats, num_blocks = admission.num_missing(head)
    chosen = list[SequenceGroup]()
    for group in candidates:
        if num_seats <= 0 and num_blocks <= 0:
            return chosen
        chosen.append(group)
        num_seats -= len(group.members)
        num_blocks -= sum(len(table) for seq in group.members for table in seq.block_tables)
    return chosen if num_seats <= 0 and num_blocks <= 0 else []
