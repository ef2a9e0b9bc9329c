from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from pagestream_streams.protocol.prefixes import prefixes_of

FIRST = 4
PROMPTS = st.lists(st.integers(0, 3), max_size=400)


@given(PROMPTS, PROMPTS, PROMPTS)
def test_prompts_share_exactly_the_digests_of_what_they_begin_with_alike(
    head: list[int], one: list[int], other: list[int]
) -> None:
    first, second = [*head, *one], [*head, *other]
    pairs = enumerate(zip(first, second, strict=False))
    alike = next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
    for mine, yours in zip(prefixes_of(first, FIRST), prefixes_of(second, FIRST), strict=False):
        assert mine.num_tokens == yours.num_tokens
        assert (mine.digest == yours.digest) == (mine.num_tokens <= alike)


@given(st.integers(0, 40_000))
def test_beginnings_are_few_and_no_step_is_longer_than_an_eighth(length: int) -> None:
    ends = [0, *(each.num_tokens for each in prefixes_of([1] * length, 64))]
    assert len(ends) <= 90
    assert all(end - start <= max(64, start // 8) for start, end in pairwise(ends))
    assert min(length, 32_768) - ends[-1] < max(64, ends[-1] / 8 + 1)


def test_salts_are_apart() -> None:
    assert prefixes_of(range(64), 64, b"a") != prefixes_of(range(64), 64, b"b") != prefixes_of(range(64), 64)
