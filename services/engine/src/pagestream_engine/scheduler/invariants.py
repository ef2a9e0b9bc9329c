"""What must always be true of groups; checked after every step in tests."""

from __future__ import annotations

from collections.abc import Iterable

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.request import SequenceGroup, SequenceState, TokenSequence


def check_groups(sequences: Iterable[TokenSequence]) -> None:
    """Check that every unfinished sequence is a member of one group, and that the members of a group stand together.

    Raises:
        InvariantViolation: names the first contradiction.
    """
    sequences = list(sequences)
    groups = {id(seq.group): seq.group for seq in sequences}
    members = [seq for group in groups.values() for seq in group.members]
    _require(sorted(map(id, members)) == sorted(map(id, sequences)), "the groups' members are not the sequences")
    for group in groups.values():
        _check_group(group)


def _check_group(group: SequenceGroup) -> None:
    first = group.members[0]
    for seq in group.members:
        _require(seq.group is group, f"{seq!r} is a member of two groups")
        _require(seq.state is first.state, f"{seq!r} does not stand where {first!r} stands")
    for seq in group.followers:
        _require(seq in group.members, f"{seq!r} follows a group that it is no member of")
        _require(seq.state is SequenceState.RUNNING and not any(seq.block_tables), f"{seq!r} follows, and holds blocks")
    _require(len(group.followers) in (0, len(group.members) - 1), f"{first!r} has not one leader in its group")


def _require(holds: bool, contradiction: str) -> None:
    if not holds:
        raise InvariantViolation(contradiction)
