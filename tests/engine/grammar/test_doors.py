"""What gateways refuse and what engines can do are the same: the package that both ask has the limits of both."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from pagestream_engine import LLM, SamplingParams, StructuredOutputsParams
from pagestream_grammars import (
    MAX_CHOICES,
    Grammar,
    GrammarError,
    choice_grammar,
    fault,
    json_grammar,
    rules_grammar,
)
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served
DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo-model" / "model"
TEXT = {"type": "string", "maxLength": 3}
MOST_OPTIONAL = 498


def properties(count: int, value: Any = True) -> dict[str, Any]:
    return {f"property_{place}": value for place in range(count)}


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": properties(count, TEXT)}


def required(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": properties(count), "required": [*properties(count)]}


def told_apart(place: int) -> dict[str, Any]:
    given = {"kind": {"const": f"k{place}"}, **properties(30, TEXT)}
    return {"type": "object", "properties": given, "required": ["kind"]}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(DEMO_MODEL, num_gpu_blocks_override=400, max_num_seqs=16, device="cpu")


TAKEN: dict[str, dict[str, Any]] = {
    "as many choices as may be": {"choice": [f"label {place}" for place in range(MAX_CHOICES)]},
    "as many optional properties": {"json": optional(MOST_OPTIONAL)},
    "nested": {"json": {"type": "array", "items": optional(MOST_OPTIONAL), "minItems": 1}},
    "required between": {
        "json": {
            "type": "object",
            "properties": {**properties(400, TEXT), "between": TEXT, **{f"x{n}": TEXT for n in range(400)}},
            "required": ["between"],
        }
    },
    "an enumeration": {"json": {"enum": [f"value {place}" for place in range(5000)]}},
    "objects of an enumeration": {"json": {"enum": [{"a": place} for place in range(1999)]}},
    "alternatives told apart": {"json": {"anyOf": [told_apart(place) for place in range(40)]}},
    "names by a pattern": {"json": {"type": "object", "patternProperties": {"^[a-z]{1,9}$": {"type": "integer"}}}},
    "a format that is a note": {"json": {"type": "string", "format": "color-hex", "maxLength": 9}},
    "a property with the name of a note": {
        "json": {"type": "object", "properties": {"title": TEXT}, "required": ["title"]}
    },
}


@pytest.mark.parametrize("constraint", TAKEN.values(), ids=TAKEN)
def test_what_the_door_lets_in_runs(llm: LLM, constraint: dict[str, Any]) -> None:
    params = SamplingParams(
        max_tokens=80, temperature=1.0, seed=4, structured_outputs=StructuredOutputsParams(**constraint)
    )
    assert fault(params.structured_outputs.compiled_from) is None
    [answer] = llm.generate("A list: ", params, use_tqdm=False)[0].outputs
    assert answer.error is None
    assert answer.finish_reason in ("stop", "length")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "optional properties": (
        optional(MOST_OPTIONAL + 1),
        "an object with 499 optional properties in a row, expected at most 498",
    ),
    "deep within": ({"$defs": {"a": {"items": optional(600)}}, "$ref": "#/$defs/a"}, "600 optional properties"),
    "objects of an enumeration": (
        {"enum": [{"a": place} for place in range(2001)]},
        "enum with 2001 lists and objects",
    ),
    "alternatives": ({"anyOf": [optional(20)] * 30}, "anyOf with 2610 ways to begin"),
    "alternatives by reference": ({"$defs": {"a": optional(20)}, "oneOf": [{"$ref": "#/$defs/a"}] * 30}, "oneOf"),
}


@pytest.mark.parametrize(("schema", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_room_is_refused_at_the_door(llm: LLM, schema: dict[str, Any], reason: str) -> None:
    refused = fault(json_grammar(schema))
    assert reason in str(refused)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    [answer] = llm.generate("x", params, use_tqdm=False)[0].outputs
    assert answer.error == f"structured_outputs: {refused}"


def test_openais_promises_hold() -> None:
    """5,000 properties, 1,000 values of an enumeration: https://platform.openai.com/docs/guides/structured-outputs."""
    described = {name: {"type": "string", "description": "x" * 100} for name in properties(5000)}
    schema = {"type": "object", "properties": described, "required": [*described], "additionalProperties": False}
    grammar = json_grammar(schema)
    assert "description" not in grammar.text
    assert fault(grammar) is None
    assert fault(json_grammar({"enum": [f"value {place}" for place in range(1000)]})) is None


def test_equal_schemas_are_one_grammar_whatever_they_say_about_themselves() -> None:
    plain = {"type": "object", "properties": {"description": {"type": "string"}}, "required": ["description"]}
    told = {
        **plain,
        "title": "Answer",
        "$comment": "about it",
        "properties": {
            "description": {"type": "string", "description": "what it is", "examples": ["a"], "format": "x"}
        },
    }
    assert json_grammar(told) == json_grammar(plain)
    assert json.loads(json_grammar(told).text) == plain
    kept = {"enum": [{"title": "a"}], "const": {"description": "b"}, "format": "date"}
    assert json.loads(json_grammar(kept).text) == kept


def test_schemas_in_rules_do_not_count_as_rules() -> None:
    values = json.dumps([f"a value of many {place}" for place in range(5000)])
    rules = f'start: "a" | %json {{"enum": {values}}}'
    assert fault(rules_grammar(rules)) is None
    with pytest.raises(GrammarError, match="beside its schemas"):
        rules_grammar(f"start: {' | '.join(['/a/'] * 12_000)}")


def test_many_that_ask_for_one_verdict_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, found = choice_grammar(["asked", "once"]), []
    has_begun, may_end = threading.Event(), threading.Event()

    def find(given: Grammar) -> None:
        found.append(given)
        has_begun.set()
        assert may_end.wait(LIMIT_S)

    monkeypatch.setattr("pagestream_grammars.compiling._find", find)
    threads = [threading.Thread(target=fault, args=(grammar,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert has_begun.wait(LIMIT_S)
    may_end.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == [grammar]
    assert fault(grammar) is None
    assert len(found) == 1
