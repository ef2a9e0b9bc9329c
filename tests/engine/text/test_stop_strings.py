from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine.output import StopStringMatcher

TEXTS = st.text(alphabet="abé", max_size=30)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3)


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStringMatcher(stops, include_stop_string=include)
    shown = []
    for piece in pieces:
        match = matcher.push(piece)
        shown.append(match.text)
        if match.stop_string is not None:
            return shown, match.stop_string
    return [*shown, matcher.flush()], None


def test_holds_back_what_may_become_a_stop_string() -> None:
    assert run(["Hello E", "N", "D and more"], ["END"]) == (["Hello ", "", ""], "END")


def test_gives_back_what_did_not() -> None:
    assert run(["Hello E", "N", "T"], ["END"]) == (["Hello ", "", "ENT", ""], None)


def test_gives_back_the_beginning_of_a_stop_string_at_the_end() -> None:
    assert run(["Hello EN"], ["END"]) == (["Hello ", "EN"], None)


def test_includes_the_stop_string_if_asked_for() -> None:
    assert run(["a", "\n", "\nb"], ["\n\n"], include=True) == (["a", "", "\n\n"], "\n\n")


def test_the_string_that_is_complete_first_wins() -> None:
    assert run(["xabcd"], ["abcd", "bc"]) == (["xa"], "bc")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert run(["xabc"], ["bc", "abc"]) == (["x"], "abc")


def test_an_overlapping_beginning_is_not_lost() -> None:
    assert run(["aab", "aac"], ["aac"]) == (["aab", ""], "aac")
    assert run(["aa", "a", "b"], ["aab"]) == (["", "a", ""], "aab")


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Where the stop string that is complete first starts and ends, found character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


@given(TEXTS, STOPS, st.lists(st.integers(0, 30), max_size=8), st.booleans())
def test_does_not_depend_on_where_the_text_is_cut(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    shown, stop = run(pieces, stops, include=include)
    match = first_match(text, stops)
    if match is None:
        assert (stop, "".join(shown)) == (None, text)
    else:
        assert stop == text[match[0] : match[1]]
        assert "".join(shown) == text[: match[1] if include else match[0]]


@given(TEXTS, STOPS)
def test_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    match = StopStringMatcher(stops).push(text)
    if match.stop_string is None:
        held = text[len(match.text) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("piece", ["", "abc"])
def test_without_a_stop_string_nothing_is_held(piece: str) -> None:
    assert StopStringMatcher(()).push(piece) == (piece, None)
