"""What an output may be where a form is asked for beside tools: the answer in that form, or calls."""

from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from pagestream.v1.inference_pb2 import StructuredOutputs
from pagestream_gateway.core.models import load_model
from pagestream_gateway.core.output.choice import with_calls
from pagestream_gateway.core.output.tools import Tools
from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from support.engines.synthetic_engine import synthetic_card

ANSWER = StructuredOutputs(json='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
PARAMETERS = {"type": "object", "properties": {"b": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
TOOLS = Tools([{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}])
ARGUMENTS = '{"b": 2}'
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": ARGUMENTS}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": ARGUMENTS}]',
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}


def grammar(parser: str, answer: StructuredOutputs = ANSWER, tools: Tools = TOOLS, template: str = "") -> str:
    card = synthetic_card(chat_template=template)
    card.tool_call_parser = parser
    return with_calls(answer, tools, load_model(card), "response_format").grammar


def matches(text: str, rules: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar_from("grammar", rules))
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("parser", [*CALLS])
def test_an_answer_or_calls_match(parser: str) -> None:
    rules = grammar(parser)
    assert matches('{"a": 1}', rules)
    assert matches(CALLS[parser].replace("ARGUMENTS", ARGUMENTS), rules)
    assert not matches(CALLS[parser].replace("ARGUMENTS", '{"b": "2"}'), rules)
    assert not matches('{"a": "1"}', rules)
    assert not matches("So: ", rules)


def test_calls_of_deepseek_v3_have_their_kind() -> None:
    call = f"function<｜tool▁sep｜>f\n```json\n{ARGUMENTS}\n```"
    text = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert matches(text, grammar("deepseek_v3", template="{{ tools }}```json"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parser": "pythonic"}, "have no grammar here"),
    ({"parser": "hermes", "answer": StructuredOutputs(regex="a")}, "only JSON"),
    ({"parser": "hermes", "answer": StructuredOutputs(json='{"multipleOf": 1e9}')}, "multipleOf"),
    (
        {"parser": "hermes", "tools": Tools([{"function": {"name": "f", "parameters": {"multipleOf": 1e9}}}])},
        "multiple",
    ),
]


@pytest.mark.parametrize(("given", "reason"), REFUSED)
def test_what_has_no_grammar_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises((UnsupportedField, InvalidRequest), match=reason):
        grammar(**given)


def test_a_marker_that_is_a_special_token_is_that_token() -> None:
    model = load_model(synthetic_card(chat_template="{{ tools }}<tool_call>"))
    model.tokenizer.add_special_tokens(["<tool_call>"])
    special = replace(model, special_tokens=frozenset({"<tool_call>"}))
    token_id = model.tokenizer.token_to_id("<tool_call>")
    assert f'call: <[{token_id}]> "\\n" body' in with_calls(ANSWER, TOOLS, special, "response_format").grammar
