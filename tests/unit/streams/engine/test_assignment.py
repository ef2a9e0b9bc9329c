"""Which partitions an engine claims from, and in which order."""

from pagestream_streams.engine.assignment import Assignment
from pagestream_streams.protocol.keys import Partition


def made(own: list[int], *, with_suspects: set[int] | None = None) -> Assignment:
    assignment = Assignment()
    assignment.partitions = [Partition("m", number) for number in range(4)]
    assignment.own = own
    assignment.with_suspects = with_suspects or set()
    return assignment


def test_own_partitions_come_before_others() -> None:
    assert made([2, 3]).order([0, 1, 2, 3], is_idle=False) == [2, 3, 0, 1]


def test_suspects_come_first_for_an_idle_engine_alone() -> None:
    assignment = made([2], with_suspects={1})
    assert assignment.order([0, 2], is_idle=True) == [1, 2, 0]
    assert assignment.order([0, 2], is_idle=False) == [2, 0]


def test_a_reserved_partition_is_the_only_one_until_the_engine_is_idle() -> None:
    assignment = made([2, 3])
    assignment.reserved = 3
    assert assignment.order([0, 2, 3], is_idle=False) == [3]
    assert assignment.order([0, 2, 3], is_idle=True) == [2, 3, 0]
    assert assignment.reserved is None


def test_a_reservation_ends_with_the_ownership() -> None:
    assignment = made([2])
    assignment.reserved = 3
    assert assignment.order([0, 2], is_idle=False) == [2, 0]
    assert assignment.reserved is None


def test_the_living_engines_share_the_partitions() -> None:
    a, b = made([]), made([])
    a.assign("a", {"a", "b"})
    b.assign("b", {"a", "b"})
    assert sorted(a.own + b.own) == [0, 1, 2, 3]


def test_a_retired_engine_owns_nothing_and_claims_at_most_its_fingerprint() -> None:
    assignment = made([1])
    assignment.retire()
    assert (assignment.own, assignment.claims_nothing) == ([], True)
    assignment.same_fingerprint_only = True
    assert not assignment.claims_nothing
