"""Counts are a function of the tokens, however often they were brought up to date on the way."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine.request.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 5), max_size=20)


@given(prompt=TOKENS, output=TOKENS, cuts=st.lists(st.integers(0, 20), max_size=4), with_prompt=st.booleans())
def test_equal_tokens_have_equal_counts(
    prompt: list[int], output: list[int], cuts: list[int], with_prompt: bool
) -> None:
    tokens = [*prompt, *output]
    grown = TokenCounts(with_prompt=with_prompt)
    for cut in sorted(min(cut, len(output)) for cut in cuts):
        grown.catch_up(tokens[: len(prompt) + cut], len(prompt))
    grown.catch_up(tokens, len(prompt))
    expected = Counter(dict.fromkeys(prompt, 0) if with_prompt else {})
    expected.update(output)
    assert dict(zip(grown.token_ids, grown.counts, strict=True)) == expected
    made_at_once = TokenCounts(with_prompt=with_prompt)
    made_at_once.catch_up(tokens, len(prompt))
    assert (made_at_once.token_ids, made_at_once.counts) == (grown.token_ids, grown.counts)


@pytest.mark.parametrize("with_prompt", [True, False])
def test_nothing_has_no_counts(with_prompt: bool) -> None:
    counts = TokenCounts(with_prompt=with_prompt)
    counts.catch_up([], 0)
    assert not counts.token_ids
