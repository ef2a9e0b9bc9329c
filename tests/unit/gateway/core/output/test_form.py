"""What a chat's template and settings make of its prompt, and of the record that says how its output is divided."""

from dataclasses import replace
from typing import Any

import pytest
from pagestream.v1.inference_pb2 import SamplingParams, StructuredOutputs
from pagestream.v1.records_pb2 import API_FORM_CHAT_COMPLETIONS, API_FORM_GRPC, AnswerForm, ModelCard
from pagestream_gateway.core.drafts import ChatPrompt, Draft
from pagestream_gateway.core.models import load_model
from pagestream_gateway.core.output.tools import Tools
from pagestream_gateway.core.preparation import PreparedRequest, prepare
from pagestream_gateway.errors import UnsupportedField
from pagestream_gateway.settings import LimitSettings
from pagestream_streams.protocol.output_formats import OutputParsers
from support.engines.synthetic_engine import REASONING_MARKS, synthetic_card
from support.protocol.chat_templates import DEEPSEEK_R1, DEEPSEEK_V31, GLM, GPT_OSS, QWEN_CODER

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = Tools([{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}])
USER = {"role": "user", "content": "Weather?"}
CALL: dict[str, Any] = {
    "id": "1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
}
OTHER = {**CALL, "id": "2", "function": {"name": "get_weather", "arguments": {"city": "Bergen"}}}


def prepared(
    template: str,
    messages: list[dict[str, Any]] | None = None,
    *,
    special: str = "",
    schema: str = "",
    card: ModelCard | None = None,
    **more: Any,
) -> tuple[str, Draft, PreparedRequest]:
    """Return the rendered prompt, the draft with its record, and what was prepared."""
    model = load_model(card or synthetic_card(max_model_len=8192, chat_template=template))
    model = replace(model, special_tokens=frozenset({special}), parsers=more.pop("parsers", model.parsers))
    sampling = SamplingParams()
    if schema:
        sampling.structured_outputs.CopyFrom(StructuredOutputs(json=schema))
    answer = AnswerForm(api=more.pop("api", API_FORM_CHAT_COMPLETIONS))
    prompt = ChatPrompt([USER] if messages is None else messages, **{"tools": TOOLS, **more})
    draft = Draft("m", [prompt], "messages", sampling, answer)
    found = prepare(draft, model, LimitSettings())
    return model.decode(list(found.prompts[0])), draft, found


@pytest.mark.parametrize(
    ("template", "parsers", "expected"),
    [
        (GPT_OSS, ("", ""), ("openai", "openai_gptoss")),
        (QWEN_CODER, ("", ""), ("qwen3_coder", "")),
        (GLM, ("", ""), ("glm45", "think")),
        (DEEPSEEK_R1, ("", ""), ("deepseek_v3", "open")),
        (DEEPSEEK_V31, ("", ""), ("deepseek_v3", "think")),
        (QWEN_CODER, ("hermes", "deepseek_r1"), ("hermes", "open")),
        (GLM, ("qwen3_xml", "none"), ("qwen3_coder", "")),
        ("{{ messages }}", ("llama4_pythonic", "qwen3"), ("pythonic", "think")),
        (GPT_OSS, ("none", "none"), ("", "")),
    ],
)
def test_the_format_is_that_of_the_template_or_the_one_that_is_named(
    template: str, parsers: tuple[str, str], expected: tuple[str, str]
) -> None:
    _, draft, _ = prepared(template, parsers=OutputParsers(*parsers))
    assert (draft.answer.output.tool_format, draft.answer.output.reasoning_format) == expected
    typed = {tool.name: [each.name for each in tool.parameters] for tool in draft.answer.output.typed_tools}
    assert typed == ({"get_weather": ["days"]} if expected[0] in ("qwen3_coder", "glm45") else {})


def test_special_tokens_are_shown_where_they_tell_the_format() -> None:
    assert not prepared(GPT_OSS, special="<|channel|>")[2].sampling.skip_special_tokens
    assert prepared(GPT_OSS, special="<|channel|>", api=API_FORM_GRPC)[2].sampling.skip_special_tokens
    assert not prepared(GLM, special="<think>", tools=Tools())[2].sampling.skip_special_tokens
    assert prepared(GLM, special="<|user|>")[2].sampling.skip_special_tokens
    forced = replace(TOOLS, is_forced=True)
    assert prepared(GLM, special="<tool_call>", tools=forced, schema='{"type": "array"}')[
        2
    ].sampling.skip_special_tokens


def test_the_channel_of_a_constrained_output_is_opened() -> None:
    text, draft, _ = prepared(GPT_OSS, schema='{"type": "object"}', tools=Tools())
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>")
    assert not draft.answer.HasField("output")
    named = replace(TOOLS, is_forced=True, forced_name="get_weather")
    text, draft, _ = prepared(GPT_OSS, schema='{"type": "object"}', tools=named)
    assert text.endswith("assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>")
    assert (draft.answer.output.tool_format, draft.answer.output.reasoning_format) == ("named", "")


def test_a_message_that_is_continued_is_within_its_channel() -> None:
    _, draft, _ = prepared(GPT_OSS, [USER, {"role": "assistant", "content": "It is"}], continue_final_message=True)
    assert draft.answer.output.opening == "<|channel|>final<|message|>"


def test_calls_and_results_are_given_to_a_template_that_takes_one_call_a_message() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Two.", "tool_calls": [CALL, OTHER]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
        {"role": "tool", "tool_call_id": "2", "content": "9"},
    ]
    text, _, _ = prepared(GPT_OSS, messages)
    _, _, turns = text.partition("Weather?<|end|>")
    assert turns == (
        "<|start|>assistant<|channel|>analysis<|message|>Two.\nI look.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"7"<|end|>'
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Bergen"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"9"<|end|>'
        "<|start|>assistant"
    )


def test_effort_is_given_to_templates_that_know_it() -> None:
    assert "Reasoning: high" in prepared(GPT_OSS, effort="high")[0]
    assert prepared(GLM, effort="high")[0] == prepared(GLM)[0] == prepared(GLM, effort="minimal")[0]
    off = prepared(GLM, effort="none")[0]
    assert off == prepared(GLM, arguments={"enable_thinking": False})[0] != prepared(GLM)[0]
    own = {"enable_thinking": True}
    assert prepared(GLM, effort="none", arguments=own)[0] == prepared(GLM, arguments=own)[0]
    assert prepared(QWEN_CODER, effort="none")[0] == prepared(QWEN_CODER)[0]


def test_documents_are_given_to_a_template_that_takes_them() -> None:
    documents = [{"title": "Mill", "text": "It turns."}, {"title": "River", "text": "It runs."}]
    template = (
        "{% for each in documents or [] %}{{ each.title }}: {{ each.text }};{% endfor %}{{ messages[0].content }}"
    )
    assert prepared(template, documents=documents, tools=Tools())[0] == "Mill: It turns.;River: It runs.;Weather?"
    assert prepared(template, tools=Tools())[0] == "Weather?"
    with pytest.raises(UnsupportedField, match="documents: is not supported; model synthetic: its chat template takes"):
        prepared(GLM, documents=documents)


def test_instructions_of_a_developer_reach_a_template_that_knows_the_system_alone() -> None:
    first, later = {"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Speak Norwegian."}
    messages = [first, USER, {"role": "assistant", "content": "Yes?"}, later, USER]
    text, _, _ = prepared(QWEN_CODER, messages, tools=Tools())
    merged = [{"role": "system", "content": "Be kind.\n\nSpeak Norwegian."}, USER, messages[2], USER]
    assert text == prepared(QWEN_CODER, merged, tools=Tools())[0]
    assert "Speak Norwegian." in text
    known = "{% for each in messages %}{{ each.role }}:{{ each.content }};{% endfor %}{# developer #}"
    assert "developer:Speak Norwegian." in prepared(known, messages, tools=Tools())[0]


OPENED, MAY_BEGIN, ON_A_LINE, NONE = (1, 0), (1, 1), (1, 2), (0, 0)
"""Number of tokens of the end, and of openings."""
CONTINUED = {"messages": [USER, {"role": "assistant", "content": "It"}], "continue_final_message": True}


@pytest.mark.parametrize(
    ("template", "more", "expected"),
    [
        (DEEPSEEK_R1, {}, OPENED),
        (DEEPSEEK_V31, {"arguments": {"thinking": True}}, OPENED),
        (DEEPSEEK_V31, {}, NONE),
        (GLM, {}, ON_A_LINE),
        (GLM, {"arguments": {"enable_thinking": False}}, NONE),
        (GLM, CONTINUED, NONE),
        (QWEN_CODER, {}, NONE),
        (QWEN_CODER, {"parsers": OutputParsers("hermes", "qwen3")}, MAY_BEGIN),
        (QWEN_CODER, {"parsers": OutputParsers("hermes", "deepseek_r1")}, OPENED),
        (DEEPSEEK_R1, {"separate_reasoning": False}, NONE),
        (DEEPSEEK_R1, {"api": API_FORM_GRPC}, NONE),
        (DEEPSEEK_R1, {"schema": ""}, NONE),
        (DEEPSEEK_R1, {"words": ()}, NONE),
        (DEEPSEEK_R1, {"constrains": False}, NONE),
        (GPT_OSS, {}, NONE),
    ],
)
def test_reasoning_before_a_form_has_marks_where_it_may_come(
    template: str, more: dict[str, Any], expected: tuple[int, int]
) -> None:
    chat = {"schema": '{"type": "object"}', "tools": Tools(), "words": REASONING_MARKS, "constrains": True, **more}
    card = synthetic_card(max_model_len=8192, chat_template=template, words=chat.pop("words"))
    card.takes_output_constraints = chat.pop("constrains")
    _, draft, _ = prepared(template, card=card, **chat)
    assert (len(draft.marks.end.ids), len(draft.marks.openings)) == expected
    if chat["schema"]:
        form = {OPENED: "open", NONE: ""}.get(expected, "think")
        assert (draft.answer.output.reasoning_format, draft.answer.output.keeps_blanks) == (form, bool(form))
