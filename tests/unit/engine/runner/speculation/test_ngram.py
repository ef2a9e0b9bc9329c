"""Drafts by n-grams: what followed the latest place where most of the last tokens stood before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine import SamplingParams
from pagestream_engine.runner.speculation.ngram import NgramProposer
from pagestream_engine.runner.speculation.proposer import RowCount
from pagestream_engine.step.records import NewSequence


def sequence(row: int, token_ids: list[int]) -> NewSequence:
    tokens = np.array(token_ids, np.int32)
    return NewSequence(row, tokens, len(tokens), 0, SamplingParams(), 0, (), ())


def by_definition(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :] and length < len(tokens):
                following = tokens[start + length :]
                return [following[index % len(following)] for index in range(count)]
    return []


@given(
    tokens=st.lists(st.sampled_from([0, 1, 2, 256, 65536, 16_777_217]), min_size=1, max_size=40),
    cut=st.integers(1, 40),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 6),
)
def test_it_proposes_what_the_definition_says(
    tokens: list[int], cut: int, shortest: int, more: int, count: int
) -> None:
    """Token ids with equal bytes at other offsets are among them."""
    proposer = NgramProposer(2, shortest, shortest + more)
    proposer.start(sequence(1, tokens[:cut]))
    for token in tokens[cut:]:
        proposer.extend(1, [token])
    assert list(proposer.propose((), [RowCount(1, count)])[0]) == by_definition(
        tokens, shortest, shortest + more, count
    )


@pytest.mark.parametrize("distance", [100, 9000])
def test_it_searches_the_latest_tokens_only(distance: int) -> None:
    """The bound of its time."""
    proposer = NgramProposer(1, 2, 3)
    proposer.start(sequence(0, [1, 2, 3, *range(10, 10 + distance), 1, 2]))
    assert list(proposer.propose((), [RowCount(0, 1)])[0]) == ([3] if distance == 100 else [])
