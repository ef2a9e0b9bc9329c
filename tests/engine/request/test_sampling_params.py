from __future__ import annotations

import math
from typing import Any

import pytest
from pagestream_engine import InvalidSamplingParams, ReasoningMarks, SamplingParams, StructuredOutputsParams
from pagestream_engine.sampling_params import child_seed
from pagestream_grammars import Grammar

MAX_CHOICES, MAX_BEAM_WIDTH = 16_384, 64
MAX_WORDS, MAX_GRAMMAR_BYTES, MAX_NESTING = 4096, 1 << 16, 64
MAX_SCHEMA_BYTES, MAX_DOCUMENT_BYTES = 1 << 18, 1 << 20
"""Choices of a constraint, and the sizes of a grammar."""


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.ignore_eos) == (16, 0, None, False)
    assert params.skip_special_tokens
    assert not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.0),
        ("n", True),
        ("n", MAX_CHOICES + 1),
        ("best_of", MAX_CHOICES + 1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 1 << 63),
        ("seed", "x"),
        ("stop", 5),
        ("stop", [1]),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 7),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", 1 << 63),
        ("max_tokens", 0),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "no"),
        ("best_of", 0),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "x"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-39),
        ("repetition_penalty", 1e38),
        ("logprobs", -2),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("prompt_logprobs", -2),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [1]),
        ("bad_words", [""]),
        ("bad_words_token_ids", [[]]),
        ("bad_words_token_ids", [[1], [-1]]),
        ("bad_words_token_ids", [1]),
        ("bad_words_token_ids", [[1]] * 4097),
        ("bad_words_token_ids", [[1] * 515]),
        ("bad_words_token_ids", [[1] * 512, *[[1]] * 512]),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: "x"}),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_a_malformed_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"^{field}: given ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)


def test_borders_of_the_ranges_are_inside() -> None:
    SamplingParams(presence_penalty=2, frequency_penalty=-2.0, repetition_penalty=1e-6, logprobs=-1)
    SamplingParams(n=MAX_CHOICES, best_of=MAX_CHOICES, repetition_penalty=1e6)


def test_a_bias_has_numbers_for_ids_and_stays_within_a_hundred() -> None:
    assert SamplingParams(logit_bias={"3": 10**400, 4: -500.0, 5: 1}).logit_bias == {3: 100.0, 4: -100.0, 5: 1.0}


def test_a_bias_is_a_copy() -> None:
    given = {1: 1.0}
    params = SamplingParams(logit_bias=given)
    given[2] = 2.0
    assert params.logit_bias == {1: 1.0}


def test_best_of_is_at_least_n() -> None:
    assert SamplingParams(n=2, best_of=2).best_of == 2
    with pytest.raises(InvalidSamplingParams, match=r"best_of: given 2, expected at least n \(3\)"):
        SamplingParams(n=3, best_of=2)


@pytest.mark.parametrize(
    ("given", "has_penalties"),
    [
        ({}, False),
        ({"logit_bias": {1: 0.5}, "logprobs": 0}, False),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"repetition_penalty": 1.5}, True),
    ],
)
def test_whether_there_are_penalties(given: dict[str, Any], has_penalties: bool) -> None:
    params = SamplingParams(**given)
    assert params.has_penalties is has_penalties
    assert params.for_child(1, 1).has_penalties is has_penalties


@pytest.mark.parametrize(("given", "kept"), [(None, ()), ("END", ("END",)), (["a", "b"], ("a", "b")), ((), ())])
def test_stop_strings_become_a_tuple(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop_strings == kept


def test_equal_parameters_are_equal_and_hashable() -> None:
    assert len({SamplingParams(stop=["a"], stop_token_ids=[1]), SamplingParams(stop="a", stop_token_ids=(1,))}) == 1
    assert len({SamplingParams(logit_bias={1: 1}), SamplingParams(logit_bias={1: 1.0}), SamplingParams()}) == 2


def test_fewer_tokens_than_were_asked_for_at_least() -> None:
    params = SamplingParams(min_tokens=5, max_tokens=9).with_max_tokens(3)
    assert (params.min_tokens, params.max_tokens) == (3, 3)


def test_max_tokens_may_be_what_the_context_leaves() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=100).max_tokens is None


def test_choices_have_unrelated_seeds() -> None:
    assert child_seed(42, 0) == 42
    seeds = {child_seed(seed, child) for seed in range(20) for child in range(20)}
    assert len(seeds) == 400
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)
    assert child_seed(42, 1) == -113578372952957693, "logs of earlier versions must resume"


def test_the_parameters_of_a_choice() -> None:
    child = SamplingParams(n=3, seed=5, top_k=4).for_child(5, 2)
    assert (child.n, child.seed, child.top_k) == (1, child_seed(5, 2), 4)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {3: 1.0}),
        ("allowed_token_ids", [3]),
        ("bad_words", ["no"]),
        ("prompt_logprobs", 1),
        ("stop", "."),
        ("early_stopping", "maybe"),
        ("early_stopping", 1),
        ("length_penalty", math.inf),
        ("beam_width", 1),
        ("beam_width", MAX_BEAM_WIDTH + 1),
        ("use_beam_search", 1),
    ],
)
def test_what_makes_no_sense_in_a_beam_search_is_refused(field: str, given: object) -> None:
    with pytest.raises(InvalidSamplingParams) as caught:
        SamplingParams(**{"n": 2, "use_beam_search": True, field: given})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "given"), [("length_penalty", 2.0), ("early_stopping", True), ("beam_width", 4)])
def test_parameters_of_a_search_need_one(field: str, given: object) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"{field}: .* without beam search; set use_beam_search"):
        SamplingParams(n=2, **{field: given})  # type: ignore[arg-type]


def test_the_width_of_a_search_is_beam_width_or_best_of_or_n() -> None:
    assert SamplingParams(n=2, use_beam_search=True).width == 2
    assert SamplingParams(n=2, best_of=4, use_beam_search=True).width == 4
    child = SamplingParams(n=2, best_of=4, beam_width=8, use_beam_search=True).for_child(1, 1)
    assert (child.n, child.best_of, child.width) == (1, None, 8)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "field", "match"),
    [
        ({}, "structured_outputs", "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs", "given 'regex, choice', expected exactly one"),
        ({"json_object": False}, "structured_outputs", "exactly one"),
        ({"json_object": "yes"}, "structured_outputs.json_object", "True or False"),
        ({"json": "{"}, "structured_outputs.json", "a JSON schema"),
        ({"json": "[1]"}, "structured_outputs.json", "an object or true"),
        ({"json": {"a": object()}}, "structured_outputs.json", "a JSON schema"),
        ({"json": nested(MAX_NESTING + 1)}, "structured_outputs.json", "levels of nesting"),
        ({"json": "[" * 100_000}, "structured_outputs.json", "at most"),
        ({"json": {"multipleOf": 10**6}}, "structured_outputs.json", "multipleOf 1000000"),
        ({"json": {"multipleOf": 9999.9999}}, "structured_outputs.json", "which is 99999999"),
        ({"json": '{"multipleOf": 1e400}'}, "structured_outputs.json", "multipleOf inf"),
        ({"json": {"multipleOf": 0}}, "structured_outputs.json", "more than 0"),
        ({"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}, "structured_outputs.json", "common"),
        ({"json": {"allOf": [{"multipleOf": 1e-7}, {"multipleOf": 9973}]}}, "structured_outputs.json", "fewer places"),
        ({"grammar": 'start: %json {"multipleOf": 99999.1}'}, "structured_outputs.grammar", "multipleOf 99999.1"),
        ({"grammar": f"start: %json {'[' * 20_000}"}, "structured_outputs.grammar", "levels of nesting"),
        ({"json": {"const": "x" * MAX_SCHEMA_BYTES}}, "structured_outputs.json", "bytes"),
        ({"json": {"description": "x" * MAX_DOCUMENT_BYTES}}, "structured_outputs.json", "bytes"),
        ({"regex": ""}, "structured_outputs.regex", "not empty"),
        ({"regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "structured_outputs.regex", "bytes"),
        ({"regex": "\ud800"}, "structured_outputs.regex", "UTF-8"),
        ({"grammar": 5}, "structured_outputs.grammar", "a text"),
        ({"choice": []}, "structured_outputs.choice", "a list"),
        ({"choice": "abc"}, "structured_outputs.choice", "a list"),
        ({"choice": ["a", ""]}, "structured_outputs.choice", "not empty"),
        ({"choice": ["a"] * (MAX_WORDS + 1)}, "structured_outputs.choice", "a list"),
        ({"regex": "a", "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace", "True or False"),
    ],
)
def test_a_malformed_constraint_is_named(given: dict[str, Any], field: str, match: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=match) as caught:
        StructuredOutputsParams(**given)
    assert caught.value.field == field


def test_borders_are_inside() -> None:
    StructuredOutputsParams(json=nested(MAX_NESTING))
    StructuredOutputsParams(regex="é" * (MAX_GRAMMAR_BYTES // 2))
    beside = {str(each): {"multipleOf": each} for each in (0.01, 0.25, 15, 60, 1e3)}
    StructuredOutputsParams(json={"properties": beside})
    StructuredOutputsParams(json={"multipleOf": 0.0001})
    StructuredOutputsParams(grammar='start: %json {"multipleOf": 0.05} | "%json ["')


def test_equal_constraints_are_one_grammar_however_they_are_given() -> None:
    schema = {"type": "string", "const": "日"}
    document, text = (
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(json='{"type": "string", "const": "日"}'),
    )
    assert document.compiled_from == text.compiled_from
    assert StructuredOutputsParams(json=True).compiled_from == Grammar("json", "{}")


def test_a_beam_search_has_no_grammar() -> None:
    with pytest.raises(InvalidSamplingParams, match=r"^structured_outputs: given .*expected None with use_beam_search"):
        SamplingParams(use_beam_search=True, beam_width=2, structured_outputs=StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize("marks", [{"end": ()}, {"end": [1, -1]}, {"end": [1], "openings": [[]]}, {"end": None}])
def test_marks_of_reasoning_have_tokens(marks: dict[str, Any]) -> None:
    with pytest.raises(InvalidSamplingParams, match=r"^structured_outputs\.reasoning"):
        ReasoningMarks(**marks)
