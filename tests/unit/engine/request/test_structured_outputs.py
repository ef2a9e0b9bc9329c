"""What is wrong with a constraint before any work is done on it."""

from __future__ import annotations

from typing import Any

import pytest
from pagestream_engine import SamplingParams, StructuredOutputsParams
from pagestream_engine.errors import InvalidSamplingParams
from pagestream_engine.request.grammars import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_NESTING, Grammar
from pagestream_engine.request.structured_outputs import ReasoningMarks


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
        ({"json": {"description": "x" * MAX_GRAMMAR_BYTES}}, "structured_outputs.json", "bytes"),
        ({"regex": ""}, "structured_outputs.regex", "not empty"),
        ({"regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "structured_outputs.regex", "bytes"),
        ({"regex": "\ud800"}, "structured_outputs.regex", "UTF-8"),
        ({"grammar": 5}, "structured_outputs.grammar", "a text"),
        ({"choice": []}, "structured_outputs.choice", "a list"),
        ({"choice": "abc"}, "structured_outputs.choice", "a list"),
        ({"choice": ["a", ""]}, "structured_outputs.choice", "not empty"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "structured_outputs.choice", "a list"),
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
