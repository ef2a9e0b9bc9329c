from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine import InvalidRequest, SamplingParams, Sequence, output
from pagestream_engine.output import IncrementalDetokenizer, Pieces, Taken, begin_text, take
from support.engines.arithmetic_model import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
PIECES = Pieces(TOKENIZER)
EOS = TOKENIZER.token_to_id("</s>")
PROMPT = tuple(TOKENIZER.encode("prompt").ids)


def make(*, max_model_len: int = 100, text: bool = True, **fields: Any) -> Sequence:
    params = SamplingParams(**{"max_tokens": 20, **fields})
    ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else {EOS})
    total = min(max_model_len, len(PROMPT) + (params.max_tokens or max_model_len))
    seq = Sequence("a", PROMPT, params, seed=0, arrival=0, max_total_tokens=total, end_token_ids=ends)
    begin_text(seq, IncrementalDetokenizer(PIECES, PROMPT) if text else None, frozenset({EOS}))
    return seq


def ids(text: str) -> list[int]:
    token_ids: list[int] = TOKENIZER.encode(text).ids
    return token_ids


def run(seq: Sequence, token_ids: list[int]) -> list[Taken]:
    taken: list[Taken] = []
    for index, token_id in enumerate(token_ids):
        taken.append(take(seq, token_id, index + 1))
        if taken[-1].finish_reason is not None:
            break
    return taken


def replay(seq: Sequence, token_ids: list[int]) -> tuple[Taken | None, int]:
    """Return the end that a replay comes to, and how often it pauses."""
    parts, num_pauses = output.replay(seq, token_ids), 0
    while True:
        try:
            next(parts)
        except StopIteration as stop:
            return stop.value, num_pauses
        num_pauses += 1


def test_a_token_in_the_middle() -> None:
    assert run(make(), ids("ab")) == [Taken("a"), Taken("b")]


def test_the_models_own_end_is_stop_without_a_reason() -> None:
    assert run(make(), [*ids("a"), EOS])[-1] == Taken("", "stop", None)


def test_the_end_is_ignored_if_asked_for() -> None:
    assert run(make(ignore_eos=True), [EOS, *ids("a")]) == [Taken(""), Taken("a")]


def test_a_stop_token_names_itself_and_shows_no_text() -> None:
    token = ids("z")[0]
    assert run(make(stop_token_ids=[token]), ids("az"))[-1] == Taken("", "stop", token)
    assert run(make(stop_token_ids=[token], include_stop_str_in_output=True), ids("az"))[-1] == Taken(
        "z", "stop", token
    )


def test_an_end_token_that_is_also_a_stop_token_is_the_end() -> None:
    assert run(make(stop_token_ids=[EOS]), [EOS])[-1] == Taken("", "stop", None)
    assert run(make(stop_token_ids=[EOS], ignore_eos=True), [EOS])[-1] == Taken("", "stop", EOS)


def test_no_end_before_min_tokens() -> None:
    taken = run(make(min_tokens=3, stop="b"), [EOS, *ids("bcab")])
    assert [one.finish_reason for one in taken] == [None, None, None, None, "stop"]
    assert "".join(one.text for one in taken) == "bca"


def test_the_end_at_min_tokens() -> None:
    assert run(make(min_tokens=2), [EOS, EOS])[-1] == Taken("", "stop", None)


def test_length_by_max_tokens() -> None:
    assert run(make(max_tokens=2), ids("abc")) == [Taken("a"), Taken("b", "length")]


def test_length_by_the_context() -> None:
    assert run(make(max_tokens=None, max_model_len=len(PROMPT) + 3), ids("abcd"))[-1] == Taken("c", "length")


def test_a_stop_string_across_tokens() -> None:
    taken = run(make(stop=["bcd"]), ids("abcdef"))
    assert taken == [Taken("a"), Taken(""), Taken(""), Taken("", "stop", "bcd")]


def test_a_stop_string_beats_length() -> None:
    assert run(make(stop=["b"], max_tokens=2), ids("ab"))[-1] == Taken("", "stop", "b")


def test_what_was_held_back_comes_with_the_end() -> None:
    assert run(make(stop=["abz"], max_tokens=3), ids("aab"))[-1] == Taken("ab", "length")
    assert run(make(stop=["abz"], stop_token_ids=ids("c")), ids("aac"))[-1] == Taken("a", "stop", ids("c")[0])
    assert run(make(stop=["abz"]), [*ids("aa"), EOS])[-1] == Taken("a", "stop")


def test_an_unfinished_character_comes_with_the_end() -> None:
    assert run(make(max_tokens=2), ids("😀"))[-1] == Taken("\ufffd", "length")
    assert run(make(), [*ids("😀")[:3], EOS])[-1] == Taken("\ufffd", "stop")


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert run(make(text=False, max_tokens=2), ids("ab")) == [Taken(""), Taken("", "length")]


@given(
    st.lists(st.sampled_from([*ids("abc😀"), EOS]), min_size=1, max_size=20),
    st.integers(0, 20),
    st.fixed_dictionaries(
        {},
        optional={
            "stop": st.lists(st.sampled_from(["ab", "cab", "\ufffd", "😀a"]), max_size=2),
            "min_tokens": st.integers(0, 6),
            "stop_token_ids": st.just([ids("c")[0]]),
            "ignore_eos": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
        },
    ),
)
def test_a_replay_goes_on_exactly(token_ids: list[int], cut: int, fields: dict[str, Any]) -> None:
    undisturbed = run(make(**fields), token_ids)
    resumed = make(**fields)
    earlier = token_ids[:cut]
    has_ended = len(undisturbed) <= cut and undisturbed[-1].finish_reason is not None
    if len(undisturbed) < len(earlier):
        with pytest.raises(InvalidRequest, match=f"expected at most {len(undisturbed)}, where the output ends"):
            replay(resumed, earlier)
    elif has_ended:
        assert replay(resumed, earlier) == (undisturbed[-1], 1)
    else:
        assert replay(resumed, earlier) == (None, 1)
        going_on = [
            take(resumed, token_id, cut + 1 + index) for index, token_id in enumerate(token_ids[cut : len(undisturbed)])
        ]
        assert going_on == undisturbed[cut:]


def test_a_replay_pauses_after_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def note(_seq: Sequence, _token_id: int, num_output_tokens: int) -> Taken:
        taken.append(num_output_tokens)
        return Taken("")

    monkeypatch.setattr(output, "REPLAY_TOKENS", 4)
    monkeypatch.setattr(output, "take", note)
    assert [len(taken) for _ in output.replay(make(), [7] * 9)] == [4, 8, 9]
