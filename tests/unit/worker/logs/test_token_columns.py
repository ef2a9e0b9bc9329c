"""Which outputs go as columns, and that nothing is lost or changes its order within a sequence."""

from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine.request.outputs import StepOutput
from pagestream_worker.logs.token_columns import NO_TOKENS, PlainSequences, TokenColumns

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)


@given(st.lists(st.tuples(st.integers(1, 2**63 - 1), st.integers(0, 2**31 - 1), texts), min_size=1, max_size=9))
def test_rows_come_back_from_columns(rows: list[tuple[int, int, str]]) -> None:
    logs, token_ids, said = zip(*rows, strict=True)
    assert list(TokenColumns.of(logs, token_ids, said).rows()) == rows


def test_the_first_and_the_last_output_of_a_sequence_stay_whole() -> None:
    plain = PlainSequences()
    plain.add("a", 7)
    first, second, third = StepOutput("a", 1, "x"), StepOutput("a", 2, "é"), StepOutput("a", 3, "", "stop")
    assert plain.split([first]) == (NO_TOKENS, [first])
    assert plain.split([second, third]) == (TokenColumns.of([7], [2], ["é"]), [third])
    plain.discard("a")
    assert plain.split([second]) == (NO_TOKENS, [second])


def test_tokens_of_the_step_with_the_first_one_stay_whole_behind_it() -> None:
    plain = PlainSequences()
    plain.add("a", 7)
    outputs = [StepOutput("a", 1, "x"), StepOutput("a", 2, "y")]
    assert plain.split(outputs) == (NO_TOKENS, outputs)
    assert plain.split(outputs) == (TokenColumns.of([7, 7], [1, 2], ["x", "y"]), [])


def test_an_output_without_a_token_is_no_first_one_and_other_sequences_stay_whole() -> None:
    plain = PlainSequences()
    plain.add("a", 7)
    of_prompt, other = StepOutput("a", None, ""), StepOutput("b", 5, "z")
    first, second = StepOutput("a", 1, "x"), StepOutput("a", 2, "y")
    assert plain.split([of_prompt, other]) == (NO_TOKENS, [of_prompt, other])
    assert plain.split([first, other]) == (NO_TOKENS, [first, other])
    assert plain.split([other, second]) == (TokenColumns.of([7], [2], ["y"]), [other])
