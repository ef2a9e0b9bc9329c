from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from pagestream_streams.protocol import placement

ENGINES = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=8)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100), st.integers(1, 64))
def test_choices_are_partitions_and_differ(prompt: list[int], partitions: int) -> None:
    first, second = placement.choices(prompt, partitions, 64)
    assert 0 <= first < partitions
    assert 0 <= second < partitions
    assert first != second or partitions == 1
    assert placement.choices([*prompt[:64], 1, 2], partitions, 64) == (first, second) or len(prompt) < 64


def test_prompts_spread() -> None:
    counts = Counter(placement.choices([token], 4, 64)[0] for token in range(1000))
    assert min(counts.values()) > 150


@given(ENGINES, st.integers(1, 64))
def test_each_partition_has_one_owner(engines: set[str], partitions: int) -> None:
    owned = [number for engine in engines for number in placement.owned(engine, partitions, engines)]
    assert sorted(owned) == list(range(partitions))


@given(ENGINES, st.text(min_size=1, max_size=8), st.integers(0, 63))
def test_a_new_engine_takes_and_moves_nothing_else(engines: set[str], new: str, partition: int) -> None:
    before, after = placement.owner(partition, engines), placement.owner(partition, engines | {new})
    assert after in (before, new)


def test_without_engines_nobody_owns() -> None:
    assert placement.owner(0, []) is None
