from hypothesis import given
from hypothesis import strategies as st
from pagestream_streams.protocol import placement

ENGINES = st.frozensets(st.text(min_size=1, max_size=8), min_size=1, max_size=8)


@given(ENGINES, st.integers(1, 64))
def test_engines_own_all_partitions_equally_many_or_one_more(engines: frozenset[str], partitions: int) -> None:
    owned = placement.ownership(partitions, engines)
    assert sorted(number for numbers in owned.values() for number in numbers) == list(range(partitions))
    assert max(map(len, owned.values())) - min(map(len, owned.values())) <= 1
    assert {each: placement.owned(each, partitions, engines) for each in engines} == owned


def test_an_engine_that_comes_takes_its_share_and_little_else_moves() -> None:
    """Counted over many fleets of 8: 28 of 256 partitions have to move, and as many again may."""
    moved = []
    for fleet in range(20):
        engines = frozenset(f"{fleet}-{number}" for number in range(8))
        before, after = (placement.ownership(256, each) for each in (engines, engines | {"new"}))
        owner = {number: engine for engine, numbers in before.items() for number in numbers}
        moved.append(sum(owner[number] != engine for engine, numbers in after.items() for number in numbers))
    assert min(moved) >= 28
    assert sum(moved) / len(moved) < 56


def test_without_engines_nobody_owns() -> None:
    assert placement.ownership(4, frozenset()) == {}
