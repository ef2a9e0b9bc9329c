"""Outputs in the formats of several models, and answers of a form behind reasoning: divided alike by each API."""

from dataclasses import replace
from typing import Any

import httpx
import pytest
from pagestream.v1.records_pb2 import ModelCard, RequestSpec
from pagestream_gateway import Settings
from pagestream_streams import StreamsSettings
from support.clients.gateway_clients import gateway_settings, get_events, post_events
from support.engines.synthetic_engine import (
    ECHO_MODEL,
    REASONING_MARKS,
    SyntheticEngine,
    byte_tokenizer,
    running_engine,
    synthetic_card,
)
from support.protocol.chat_templates import DEEPSEEK_R1, GLM, GPT_OSS, QWEN_CODER, SEED_OSS

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]


FORECAST: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
OUTPUTS = {
    "gpt-oss": (
        GPT_OSS,
        "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Oslo", "days": 2}<|call|>',
    ),
    "qwen3-coder": (
        QWEN_CODER,
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "qwen3.5": (  # which has not closed its reasoning
        QWEN_CODER + "<think>",
        "Where?\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n2\n</function>\n"
        "</tool_call>",
    ),
    "seed-oss": (
        SEED_OSS,
        "<seed:think>Where?</seed:think>I look.\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
    ),
    "glm": (
        GLM,
        "\n<think>Where?</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "deepseek": (
        DEEPSEEK_R1,
        "Where?\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Oslo", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "kimi": (  # whose template shows ids
        "{{ tools }}<|tool_calls_section_begin|>{{ messages[0].content }}",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3<|tool_call_argument_begin|>"
        '{"city": "Oslo", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "gemma-4": (
        "{{ tools }}<|tool_call><|channel>{{ messages[0].content }}",
        "<|channel>thought\nWhere?\n<channel|>I look.<|tool_call>call:get_weather"
        '{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
    ),
    "granite": (
        "{{ tools }}<|tool_call|><think><response>{{ messages[0].content }}",
        "<think>Where?</think>\n<response>I look.</response>\n"
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]',
    ),
}
SILENT = ("qwen3-coder", "kimi")
"""Those whose outputs above have no reasoning."""


def joined(deltas: list[dict[str, Any]]) -> dict[str, str]:
    """Join deltas with one call as a client does."""
    found = {"content": "", "reasoning_content": "", "name": "", "arguments": ""}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            found[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            for name in ("name", "arguments"):
                found[name] += call["function"].get(name, "")
    return found


@pytest.mark.parametrize("form", [*OUTPUTS, "by its card"])
async def test_outputs_are_divided_from_any_position(http: httpx.AsyncClient, redis_url: str, form: str) -> None:
    """A card has the model's template, or names the formats of another one."""
    template, output = OUTPUTS.get(form, ("{{ messages[0].content }}", OUTPUTS["deepseek"][1]))
    card = synthetic_card(f"{ECHO_MODEL}-{form.partition(' ')[0]}", max_model_len=4096, chat_template=template)
    if form not in OUTPUTS:
        card.tool_call_parser, card.reasoning_parser = "deepseek_v31", "deepseek_r1"
    body = {
        "model": card.name,
        "messages": [{"role": "user", "content": f"[say]{output}[said]"}],
        "tools": [FORECAST],
        "max_tokens": 1000,
    }
    async with running_engine(redis_url, card):
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        request_id, events = await post_events(http, "/v1/chat/completions", body)
        deltas = [event.body["choices"][0]["delta"] for event in events[:-1]]
        found = joined(deltas)
        for cut in range(1, len(events) - 1, len(events) // 8 + 1):
            rest = await get_events(http, request_id, after=events[cut - 1].body["stream_position"])
            more = [event.body["choices"][0]["delta"] for event in rest[:-1]]
            assert joined([*deltas[:cut], *more]) == found
    assert found == {
        "content": "" if form == "qwen3.5" else "I look.",
        "reasoning_content": "" if form in SILENT else "Where?",
        "name": "get_weather",
        "arguments": '{"city": "Oslo", "days": 2}',
    }
    assert choice["finish_reason"] == events[-2].body["choices"][0]["finish_reason"] == "tool_calls"
    assert joined([choice["message"]]) == found
    call_ids = {call["id"] for call in choice["message"]["tool_calls"]}
    assert (call_ids == {"functions.get_weather:3"}) is (form == "kimi")


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined %}<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}"
)
OPENED, CLOSED = {"enable_thinking": True}, {"enable_thinking": False}
TOKENIZER = byte_tokenizer(REASONING_MARKS)
BEGIN, END = map(TOKENIZER.token_to_id, REASONING_MARKS)
NEWLINE = TOKENIZER.encode("\n", add_special_tokens=False).ids[0]
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
REQUIRED_CALL = '[{"name": "get_weather", "parameters": {"a": 1}}]'


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return synthetic_card(ECHO_MODEL, max_model_len=4096, chat_template=TEMPLATE, words=REASONING_MARKS)


@pytest.fixture(scope="module")
def settings(redis_url: str) -> Settings:
    """Settings of a gateway that looks for new models each time."""
    return replace(gateway_settings(redis_url), broker=StreamsSettings(directory_ttl_s=0.0))


def chat(output: str, arguments: dict[str, bool], **more: Any) -> dict[str, Any]:
    return {
        "model": ECHO_MODEL,
        "messages": [{"role": "user", "content": f"[say]{output}[said]"}],
        "max_tokens": 1000,
        "chat_template_kwargs": arguments,
        **more,
    }


def marks_of(spec: RequestSpec) -> tuple[list[int], list[list[int]]]:
    return list(spec.reasoning.end.ids), [list(each.ids) for each in spec.reasoning.openings]


async def divided(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, str]:
    """Return the parts of a chat's answer, which are those of its stream."""
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["message"]["refusal"] is None, "OpenAI's messages have it, null where nothing is refused"
    message, found = choice["message"], {"reasoning": "", "content": "", "arguments": ""}
    _, events = await post_events(http, "/v1/chat/completions", body)
    for event in events[:-1]:
        [of_stream] = event.body["choices"]
        delta = of_stream["delta"]
        found["reasoning"] += delta.get("reasoning_content") or ""
        found["content"] += delta.get("content") or ""
        found["arguments"] += "".join(call["function"].get("arguments", "") for call in delta.get("tool_calls", ()))
    assert found == {
        "reasoning": message.get("reasoning_content") or "",
        "content": message["content"] or "",
        "arguments": "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ()),
    }
    return {name: text for name, text in found.items() if text}


MAY_BEGIN = [[BEGIN], [NEWLINE, BEGIN]]


@pytest.mark.parametrize(
    ("arguments", "marks", "outputs"),
    [
        (OPENED, ([END], []), {'Two.\n</think>{"a": 1}': ("Two.", '{"a": 1}'), "Two": ("Two", "")}),
        ({}, ([END], MAY_BEGIN), {'\n<think>\nTwo.</think>{"a": 1}': ("Two.", '{"a": 1}'), "{}": ("", "{}")}),
        (CLOSED, ([], []), {'{"a": 1}': ("", '{"a": 1}')}),
    ],
)
async def test_an_answer_of_a_form(
    http: httpx.AsyncClient,
    engine: SyntheticEngine,
    arguments: dict[str, bool],
    marks: object,
    outputs: dict[str, tuple[str, str]],
) -> None:
    for output, (reasoning, content) in outputs.items():
        found = await divided(http, chat(output, arguments, response_format=FORM))
        assert (found.get("reasoning", ""), found.get("content", "")) == (reasoning, content)
    assert [marks_of(spec) for spec in engine.claimed] == [marks] * 2 * len(outputs)


@pytest.mark.parametrize(("choice", "output"), [("required", REQUIRED_CALL), (NAMED, '{"a": 1}')])
async def test_a_forced_call(http: httpx.AsyncClient, engine: SyntheticEngine, choice: Any, output: str) -> None:
    forced = {"tools": [WEATHER], "tool_choice": choice}
    found = await divided(http, chat(f"Two.</think>{output}", OPENED, **forced))
    assert found == {"reasoning": "Two.", "arguments": '{"a": 1}'}
    assert await divided(http, chat("Two.", OPENED, **forced)) == {"reasoning": "Two."}
    assert {marks_of(spec)[0][0] for spec in engine.claimed} == {END}


async def test_blanks_that_a_grammar_asks_for_are_content(http: httpx.AsyncClient) -> None:
    constraint = {"choice": [" yes", "no"]}
    found = await divided(http, chat("Two.\n</think> yes", OPENED, structured_outputs=constraint))
    assert found == {"reasoning": "Two.", "content": " yes"}


async def test_responses_and_messages(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    text = '[say]Two.</think>{"a": 1}[said]'
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    common = {"model": ECHO_MODEL, "chat_template_kwargs": OPENED}
    response = {**common, "input": text, "text": {"format": {**schema, "name": "a"}}}
    message = {
        **common,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 100,
        "output_config": {"format": schema},
    }
    whole = (await http.post("/v1/responses", json=response)).json()
    assert [item["content"][0]["text"] for item in whole["output"]] == ["Two.", '{"a": 1}']
    _, events = await post_events(http, "/v1/responses", response)
    assert [item["content"][0]["text"] for item in events[-1].body["response"]["output"]] == ["Two.", '{"a": 1}']
    blocks = (await http.post("/v1/messages", json=message)).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("Two.", '{"a": 1}')
    _, events = await post_events(http, "/v1/messages", message)
    deltas = [event.body["delta"] for event in events if event.body["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Two."
    assert "".join(delta.get("text", "") for delta in deltas) == '{"a": 1}'
    assert [marks_of(spec) for spec in engine.claimed] == [([END], [])] * 4
