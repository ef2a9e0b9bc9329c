"""Which partitions are an engine's own."""

from pagestream_streams.engine.assignment import Assignment
from pagestream_streams.protocol.keys import Partition


def made(own: list[int]) -> Assignment:
    assignment = Assignment()
    assignment.partitions = [Partition("m", number) for number in range(4)]
    assignment.own = own
    return assignment


def test_the_living_engines_share_the_partitions() -> None:
    a, b = made([]), made([])
    a.assign("a", {"a", "b"})
    b.assign("b", {"a", "b"})
    assert sorted([*a.own, *b.own]) == [0, 1, 2, 3]


def test_a_retired_engine_owns_nothing_and_claims_at_most_its_fingerprint() -> None:
    assignment = made([1])
    assignment.retire()
    assert (assignment.own, assignment.claims_nothing) == ((), True)
    assignment.same_fingerprint_only = True
    assert not assignment.claims_nothing
