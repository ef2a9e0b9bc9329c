"""How many drafts a row gets, and what n-grams propose.

More where they hold, fewer where a token of a step costs more, none where none pays; and what followed the latest place
where most of the last tokens stood before.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine import SamplingParams
from pagestream_engine.features.speculation.draft_model import DraftLengths, StepCost
from pagestream_engine.features.speculation.drafts import RowCount
from pagestream_engine.features.speculation.ngram import NgramProposer
from pagestream_engine.plan import NewSequence

MOST = 5


def learnt(seconds_a_token: float, *, accepts: bool, num_steps: int = 60) -> DraftLengths:
    """Run one row, whose steps take 1 s and so much more for each token."""
    lengths = DraftLengths(1, MOST, StepCost())
    for index in range(num_steps):
        drafts = lengths.wanted(0)
        accepted = drafts if accepts or index == 0 else 0
        lengths.note(0, drafts, accepted)
        lengths.cost.note(1 + drafts, 1 + accepted, 1.0 + seconds_a_token * (1 + drafts))
    return lengths


@pytest.mark.parametrize("seconds_a_token", [0.01, 0.2])
def test_drafts_that_hold_get_more(seconds_a_token: float) -> None:
    assert learnt(seconds_a_token, accepts=True).wanted(0) == MOST


def test_drafts_that_never_hold_get_none_but_two_a_while() -> None:
    lengths = learnt(0.01, accepts=False)
    tried = [lengths.wanted(0) for _ in range(64)]
    assert sorted(tried) == [0] * 60 + [1] * 4


def test_an_expensive_token_gets_fewer_drafts() -> None:
    """At equal acceptance, 0.6: a token costs a hundredth of a step, or nearly all of it."""
    numbers = []
    for slope in (0.01, 0.2, 10.0):
        lengths = DraftLengths(1, MOST, StepCost())
        for tokens in (1, 2, 3, 4) * 5:
            lengths.cost.note(tokens, tokens, 1.0 + slope * tokens)
        numbers.append(lengths.wanted(0))
    assert numbers[0] == MOST
    assert numbers[0] > numbers[1] > numbers[2] == 0


def test_the_cost_of_a_draft() -> None:
    """Steps of n tokens take 2 + n seconds and give n: of the last one's 6 tokens in 10 s, 0.6 come in a second."""
    cost = StepCost()
    for tokens in (2, 4, 8, 2, 4, 8):
        cost.note(tokens, 6, 2.0 + tokens)
    assert cost.of_a_draft == pytest.approx(6 / (2 + 14 / 3), rel=0.05)


def test_a_draft_costs_what_it_takes_to_make_it() -> None:
    """At equal acceptance, and where one more token of a step costs nothing: making a draft takes 1 % of a step, a
    third of it, or longer than a step."""
    numbers = []
    for seconds in (0.01, 0.3, 1.5):
        lengths = DraftLengths(1, MOST, StepCost())
        for drafts in (0, 1, 2, 3) * 5:
            lengths.cost.note(1 + drafts, 1, 1.0, drafts, seconds * drafts)
        numbers.append(lengths.wanted(0))
    assert numbers[0] == MOST
    assert numbers[0] > numbers[1] > numbers[2] == 0


def test_a_row_is_known_after_a_few_checked_drafts() -> None:
    lengths = DraftLengths(1, 15, StepCost())
    for tokens in (1, 2, 3, 4) * 5:
        lengths.cost.note(tokens, 1, 1.0 + 0.1 * tokens)
    before = lengths.wanted(0)
    lengths.note(0, 6, 6)
    assert lengths.wanted(0) >= 2 * before > 0


def test_a_new_row_expects_what_others_have_accepted() -> None:
    lengths = DraftLengths(2, MOST, StepCost())
    before = lengths.wanted(1)
    for _ in range(400):
        lengths.note(0, 1, 0)
    lengths.start(1)
    assert lengths.wanted(1) < before


# -- n-grams ----------------------------------------------------------------------------------------------------------


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
