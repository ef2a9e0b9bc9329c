"""Where a gate lets the grammar begin, whatever the tokens are and however they come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine.grammar.reasoning_gate import Phase, ReasoningGate
from pagestream_engine.request.structured_outputs import ReasoningMarks

OPEN, END, NEWLINE = 7, 8, 9
OPENED = ReasoningMarks(end=[END])
MAY_BEGIN = ReasoningMarks(end=[END], openings=[[OPEN], [NEWLINE, OPEN]])
OF_SEVERAL = ReasoningMarks(end=[1, 1, 2], openings=[[1, 2]])


def grammar_start(marks: ReasoningMarks | None, token_ids: Sequence[int]) -> int | None:
    """Return the place of the grammar's first token; None where it has not come."""
    gate = ReasoningGate(marks)
    taken = [gate.take(token_id) for token_id in token_ids]
    assert taken == sorted(taken)
    return taken.index(True) if True in taken else None


@pytest.mark.parametrize(
    ("marks", "token_ids", "start"),
    [
        (None, [1], 0),
        (OPENED, [1, 2, END, END, 3], 3),
        (OPENED, [OPEN, 2], None),
        (MAY_BEGIN, [1, OPEN, END], 0),
        (MAY_BEGIN, [END, 1], 0),
        (MAY_BEGIN, [OPEN, END, 1], 2),
        (MAY_BEGIN, [NEWLINE, OPEN, 1, END, 2], 4),
        (MAY_BEGIN, [NEWLINE, 1], 1),
        (OF_SEVERAL, [1, 2, 1, 1, 2, 5], 5),
        (OF_SEVERAL, [1, 2, 1, 1, 1, 2, 5], 6),
        (OF_SEVERAL, [1, 2, 1, 2], None),
    ],
)
def test_where_the_grammar_begins(marks: ReasoningMarks | None, token_ids: list[int], start: int | None) -> None:
    assert grammar_start(marks, token_ids) == start


def test_what_an_opening_may_have_next() -> None:
    gate = ReasoningGate(MAY_BEGIN)
    assert (gate.phase, gate.expected()) == (Phase.BEGIN, [OPEN, NEWLINE])
    gate.take(NEWLINE)
    assert (gate.phase, gate.expected()) == (Phase.OPENING, [OPEN])
    gate.take(OPEN)
    assert (gate.phase, gate.expected()) == (Phase.REASONING, [])


@given(st.lists(st.sampled_from([1, 2, OPEN, END, NEWLINE])), st.sampled_from([OPENED, MAY_BEGIN, OF_SEVERAL]))
def test_looking_ahead_changes_nothing(token_ids: list[int], marks: ReasoningMarks) -> None:
    gate = ReasoningGate(marks)
    taken = []
    for place, token_id in enumerate(token_ids):
        ahead = gate.ahead()
        for later in token_ids[place:]:
            ahead.take(later)
        taken.append(gate.take(token_id))
    assert (taken.index(True) if True in taken else None) == grammar_start(marks, token_ids)
