"""Answers of a form, and forced calls, behind reasoning: divided alike by each API, whole and streamed.

The engine writes what the test asks for, and has no grammar; that of engines is tested in
tests/integration/engine/test_structured_output.py.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pagestream.v1.records_pb2 import RequestSpec
from support.clients.gateway_clients import post_events
from support.engines.synthetic_engine import (
    ECHO_MODEL,
    REASONING_MARKS,
    SyntheticEngine,
    byte_tokenizer,
    running_engine,
    synthetic_card,
)

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


@pytest.fixture(autouse=True)
async def engine(redis_url: str) -> AsyncIterator[SyntheticEngine]:
    card = synthetic_card(ECHO_MODEL, max_model_len=4096, chat_template=TEMPLATE, words=REASONING_MARKS)
    async with running_engine(redis_url, card) as running:
        yield running


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
